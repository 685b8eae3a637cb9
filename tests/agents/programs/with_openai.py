"""An agent of OpenAI's client alone: the loop of its documentation."""

import json

from jar_task import read_task
from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look into a jar.",
        "parameters": {
            "type": "object",
            "properties": {"jar": {"type": "string", "description": "Its letter."}},
            "required": ["jar"],
        },
    },
}

task = read_task()
client = OpenAI()
messages = [{"role": "user", "content": task.question}]
for _ in range(8):
    completion = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
    message = completion.choices[0].message
    messages.append(message)
    for call in message.tool_calls or ():
        try:
            result = task.look(**json.loads(call.function.arguments))
        except (TypeError, ValueError) as error:
            result = str(error)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not message.tool_calls:
        print(message.content)
        break
