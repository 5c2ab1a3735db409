"""A tool loop with Anthropic's client."""

from anthropic import Anthropic

client = Anthropic()
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"name": "weather", "description": "The weather of a city.", "input_schema": schema}]
messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
while True:
    answer = client.messages.create(model="claude-sonnet-4-5", max_tokens=200, messages=messages, tools=tools)
    if answer.stop_reason != "tool_use":
        break
    messages.append({"role": "assistant", "content": answer.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
        for block in answer.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})
print(answer.content[0].text)
