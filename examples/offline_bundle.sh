#!/usr/bin/env bash
# Python packages for a machine without a network, in pieces that any way of carrying takes.
#
#   examples/offline_bundle.sh DIR PIECE_MB REQUIREMENT…     on a machine with a network, the same Python and the same platform
#   sh install.sh VENV                                       in DIR, on the machine without one; VENV is made if it is not there
#
# For example: examples/offline_bundle.sh sglang 500 sglang==0.5.14
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,7p' "$0" | cut -c3-; exit 2; }
into=$1 piece=$2; shift 2
[[ $piece =~ ^[1-9][0-9]*$ ]] || { echo "error: PIECE_MB must be a whole number of MB, not $piece" >&2; exit 2; }
[ ! -e "$into" ] || { echo "error: $into is there already; give another folder" >&2; exit 2; }
staging=$(mktemp -d "${into%/}.XXXXXX")
trap 'rm -rf "$staging"' EXIT
python3 -m pip download -q -d "$staging/wheels" "$@"
printf '%s\n' "$@" > "$staging/wheels/requirements.txt"
python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' > "$staging/wheels/python.txt"
tar -C "$staging" -cf - wheels | split -b "${piece}M" -d -a 3 - "$staging/bundle.tar."
rm -r "$staging/wheels"
(cd "$staging" && sha256sum bundle.tar.* > SHA256SUMS)
cat > "$staging/install.sh" <<'INSTALL'
#!/bin/sh
# sh install.sh VENV: checks the pieces, puts them together, installs without a network.
set -eu
[ $# -eq 1 ] || { echo "usage: sh install.sh VENV" >&2; exit 2; }
venv=$1
cd "$(dirname "$0")"
sha256sum -c --quiet SHA256SUMS || { echo "error: a piece is missing or damaged: carry it again" >&2; exit 1; }
cat bundle.tar.* | tar xf -
want=$(cat wheels/python.txt)
have=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[ "$want" = "$have" ] || { echo "error: the wheels are for Python $want, python3 here is $have" >&2; exit 1; }
case $venv in /*) ;; *) venv=$OLDPWD/$venv ;; esac
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip install -q --no-index --find-links wheels -r wheels/requirements.txt
echo "installed into $venv: $(tr '\n' ' ' < wheels/requirements.txt)"
INSTALL
chmod 755 "$staging"
mv "$staging" "$into"
trap - EXIT
du -sh "$into"; ls "$into"
