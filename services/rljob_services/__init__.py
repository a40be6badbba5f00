"""The services room: chat completions in, exact tokens out."""
