"""A task, a reward, a tool and an agent of one's own; rljob.yaml names them by import path."""

from rljob.errors import TaskError
from rljob.task_config import Reward, ToolResult
from rljob_rollout_worker.agents.react import React


class Atlas:  # task: what the sandbox holds and what the model is asked
    async def setup(self, box, row):
        lines = [f"{country}={capital}\n" for country, capital in row.metadata["atlas"].items()]
        await box.write_file("atlas.txt", "".join(lines).encode())
        return row.messages()

    async def reward(self, box, row, result):
        return 1.0 if result.answer == row.metadata["answer"] else 0.0


async def spelling(box, row, result):  # reward: named in the manifest, it replaces the task's own
    said, right = result.answer or "", row.metadata["answer"]
    worth = 1.0 if said == right else 0.25 if said.lower() == right.lower() else 0.0
    return Reward(value=worth, parts={"found": float(worth > 0), "spelled": float(worth == 1)})


class LookUp:  # tool: what the model may call; a TaskError is what it reads as an error
    name, description = "look_up", "Find the capital of a country."
    parameters = {"properties": {"country": {"type": "string"}}, "required": ["country"]}

    async def call(self, box, arguments):
        found = await box.exec(["grep", "-i", "-e", f"^{arguments['country']}=", "atlas.txt"])
        if found.exit_code:
            raise TaskError(f"{arguments['country']} is not in the atlas")
        return ToolResult(text=found.stdout)


class Hinted(React):  # agent: the ReAct loop with a hint; any class with this method will do
    async def run(self, context, messages):
        hint = {"role": "user", "content": "Look it up first."}
        return await super().run(context, [*messages, hint])
