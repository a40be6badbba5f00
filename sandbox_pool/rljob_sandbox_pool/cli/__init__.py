"""What the `rljob sandbox` commands do, each imported when it is called."""
