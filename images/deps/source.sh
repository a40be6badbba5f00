#!/bin/sh
# Completes the packages copied to /source: metadata of the distribution, and bytecode, which a pod cannot write.
# Usage: source.sh PYPROJECT
set -eu
python "$(dirname "$0")/dist_info.py" "$1" /source
python -m compileall -q --invalidation-mode unchecked-hash -s /source -p /opt/rljob/source /source
