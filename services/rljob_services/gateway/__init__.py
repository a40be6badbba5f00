"""The gateway: chat completions for agents, token ids for training. Token in, token out."""
