"""Write traces of an agent that reads files with two tools: training traces in OpenAI's form, and
validation traces in Anthropic's. Some files are long logs, so some traces are long, too. The same
seed writes the same files.

python examples/agent_traces.py output/traces
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

SEED = 0
TRAINING = 200
VALIDATION = 20
LONG_SHARE = 0.1  # of the traces, those whose file is a long log
SYSTEM = "You answer questions about files. Look before you answer."
PATH = {"type": "string", "description": "Where it is."}
SCHEMA = {"type": "object", "properties": {"path": PATH}, "required": ["path"]}
TOOLS = {"list_folder": "Return the names of the files.", "read_file": "Return the text of a file."}
FOLDERS = "invoices orders reports sensors".split()
NAMES = "amber birch cedar delta ember frost grove haven".split()
Step = dict[str, Any]  # what the agent thinks, the tool that it calls, and what the tool returns


def draw_steps(generator: random.Random) -> tuple[str, list[Step], str]:
    """Return a question, the steps of the agent, and its answer."""
    folder = generator.choice(FOLDERS)
    names = generator.sample(NAMES, 3)
    count = generator.randrange(2, 6)
    if generator.random() < LONG_SHARE:
        count = generator.randrange(500, 5000)
    values = [generator.randrange(100) for _ in range(count)]
    lines = [f"{number:04} value {value}" for number, value in enumerate(values)]
    listing = "\n".join(f"{name}.log" for name in names)
    path = f"{folder}/{names[0]}.log"
    steps = [
        {
            "thought": f"I look for {names[0]}.",
            "tool": "list_folder",
            "path": folder,
            "result": listing,
        },
        {"thought": "There it is.", "tool": "read_file", "path": path, "result": "\n".join(lines)},
    ]
    question = f"What is the last value in the log {names[0]} of {folder}?"
    return question, steps, f"The last value in {path} is {values[-1]}."


def openai_trace(question: str, steps: list[Step], answer: str) -> dict[str, Any]:
    """Return a trace as OpenAI's API has it: tool_calls with JSON text, and messages of role tool."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question},
    ]
    for number, step in enumerate(steps):
        function = {"name": step["tool"], "arguments": json.dumps({"path": step["path"]})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": step["thought"], "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": step["result"]})
    messages.append({"role": "assistant", "content": answer})
    tools = []
    for name, description in TOOLS.items():
        function = {"name": name, "description": description, "parameters": SCHEMA}
        tools.append({"type": "function", "function": function})
    return {"messages": messages, "tools": tools}


def anthropic_trace(question: str, steps: list[Step], answer: str) -> dict[str, Any]:
    """Return the same trace as Anthropic's API has it: blocks of type tool_use and tool_result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for number, step in enumerate(steps):
        call_id = f"toolu_{number}"
        text = {"type": "text", "text": step["thought"]}
        arguments = {"path": step["path"]}
        call = {"type": "tool_use", "id": call_id, "name": step["tool"], "input": arguments}
        result = {"type": "tool_result", "tool_use_id": call_id, "content": step["result"]}
        messages.append({"role": "assistant", "content": [text, call]})
        messages.append({"role": "user", "content": [result]})
    messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    tools = []
    for name, description in TOOLS.items():
        tools.append({"name": name, "description": description, "input_schema": SCHEMA})
    return {"system": SYSTEM, "messages": messages, "tools": tools}


def main(folder: str) -> None:
    """Write train.jsonl and validation.jsonl into `folder`."""
    generator = random.Random(SEED)
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = {
        "train.jsonl": [openai_trace(*draw_steps(generator)) for _ in range(TRAINING)],
        "validation.jsonl": [anthropic_trace(*draw_steps(generator)) for _ in range(VALIDATION)],
    }
    for name, traces in files.items():
        lines = [json.dumps(trace) + "\n" for trace in traces]
        Path(folder, name).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
