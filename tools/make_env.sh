#!/bin/sh
# Make the development environment in the folder $1: a virtual environment with everything that tests, demo and bench
# use, at the versions of constraints.txt. On Debian as root the missing python3-venv is installed first.
set -eu
venv=$1
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "make: $python is missing or older than 3.11; set PYTHON=/path/to/python3.11 or newer" >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing python3-venv ..."
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null
    else
        echo "make: $python has no venv module; on Debian: apt-get install python3-venv" >&2
        exit 1
    fi
fi
echo "making $venv (a few minutes the first time, most of it torch) ..."
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
