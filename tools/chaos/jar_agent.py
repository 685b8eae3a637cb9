"""An agent of the jar game that knows an OpenAI URL and nothing of sluice.

`sluice agents run` starts it for each sample. It ends with code 1 when its sample cannot continue:
the front or the lease is gone.
"""

import json
import os
import sys
import time
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

_MAX_TURNS = 8
_TRIES, _PAUSE_S, _ANSWER_S = 20, 0.5, 60.0
_OVER, _BUSY, _DEFECT = 400, 429, 500
_TOOL = {
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


def _play(row: dict[str, Any]) -> float:
    """Play to the end; return 1.0 for the right answer, 0.0 for others."""
    messages, said = row["messages"], ""
    for _ in range(_MAX_TURNS):
        answer = _asked(messages)
        if answer is None:
            break
        messages.append(answer)
        said = answer.get("content") or ""
        calls = answer.get("tool_calls") or []
        for call in calls:
            seen = _look(row["extra_info"]["jars"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": seen})
        if not calls:
            break
    return float(said.rstrip().endswith(f"Answer: {row['ground_truth']}"))


def _asked(messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the policy's answer; None if the sample can have no further one."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": [_TOOL]})
    for _ in range(_TRIES):
        status, text = _posted(body)
        if status == _OVER:
            return None
        if status != _BUSY and status < _DEFECT:
            break
        time.sleep(_PAUSE_S)
    answer = json.loads(text)
    if "choices" not in answer:
        sys.exit(f"{status}: {text}")
    found: dict[str, Any] = answer["choices"][0]["message"]
    return found


def _posted(body: str) -> tuple[int, str]:
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = HTTPConnection(url.netloc, timeout=_ANSWER_S)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"{url.path}/chat/completions", body, headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except (OSError, HTTPException) as error:
        sys.exit(f"the front is away: {error}")
    finally:
        connection.close()


def _look(jars: dict[str, int], arguments: str) -> str:
    try:
        return str(jars[json.loads(arguments)["jar"]])
    except (ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    reward = _play(json.loads(sys.stdin.readline()))
    sys.stdout.write(json.dumps({"reward": reward}) + "\n")
