"""A structured answer with instructor."""

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Place(BaseModel):
    city: str


client = instructor.from_openai(OpenAI())
messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
print(client.chat.completions.create(model="gpt-4o-mini", response_model=Place, messages=messages).city)
