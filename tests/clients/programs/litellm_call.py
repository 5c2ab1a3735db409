"""A call with litellm."""

import litellm

messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
print(litellm.completion(model="openai/gpt-4o-mini", messages=messages).choices[0].message.content)
