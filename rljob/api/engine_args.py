"""Arguments of `vllm serve` that a manifest may not give: rljob sets them, or relies on how they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

RESERVED_ARGS = frozenset(
    "--model --served-model-name --host --port --uds --root-path --api-key --ssl-keyfile --ssl-certfile --middleware "
    "--worker-extension-cls --max-model-len --max-num-seqs --logprobs-mode --generation-config --tokenizer --config "
    "--headless --api-server-count --data-parallel-size --lora-modules --seed --no-enable-prefix-caching".split()
)
SHORT_ARGS = {"-dp": "--data-parallel-size", "-asc": "--api-server-count"}


def reserved(args: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Position and name of each argument in `args` that is reserved, however it is spelled."""
    for index, arg in enumerate(args):
        name = arg.split("=", 1)[0].replace("_", "-")
        if SHORT_ARGS.get(name, name) in RESERVED_ARGS:
            yield index, name
