#!/bin/sh
# What every image needs below Python packages. Usage: system.sh cpu|gpu
# Without apt-get in it, a base must bring the packages itself: tests/e2e/images/build makes such a one.
set -eu
here=$(dirname "$0")
packages=$(cat "$here/packages.txt")
case "$1" in
cpu) ;;
gpu) packages="$packages $(cat "$here/packages-gpu.txt")" ;; # Triton compiles its launchers at run time
*) echo "VARIANT is cpu or gpu, not '$1'" >&2 && exit 2 ;;
esac

if command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  # shellcheck disable=SC2086 # a list of words
  apt-get install -qq -y --no-install-recommends $packages >/dev/null
  rm -rf /var/lib/apt/lists/*
fi
python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and f"Python 3.11 is wanted, the base has {sys.version}")'

bundle=/etc/ssl/certs/ca-certificates.crt
[ -s "$bundle" ] || cat /usr/share/ca-certificates/mozilla/*.crt >"$bundle" # what the package's own script would do

# likewise: the standard library's bytecode
[ -e /usr/lib/python3.11/__pycache__/argparse.cpython-311.pyc ] || \
  python3 -m compileall -q --invalidation-mode unchecked-hash /usr/lib/python3.11

# Libraries ask who runs them (getpass.getuser): the number alone has no name.
grep -q '^rljob:' /etc/passwd || echo 'rljob:x:10001:10001::/scratch/home:/usr/sbin/nologin' >>/etc/passwd
grep -q '^rljob:' /etc/group || echo 'rljob:x:10001:' >>/etc/group
