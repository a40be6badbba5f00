"""The rollout worker room: prompts in, trajectories out."""
