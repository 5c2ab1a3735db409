"""A chat of two turns with OpenAI's client."""

from openai import OpenAI

client = OpenAI()
messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
first = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
messages += [first.choices[0].message, {"role": "user", "content": "Thanks, that helped!"}]
print(client.chat.completions.create(model="gpt-4o-mini", messages=messages).choices[0].message.content)
