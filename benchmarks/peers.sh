#!/bin/bash
# Packs the peers that benchmarks measure beside ours, for a GPU machine without a network: `benchmarks/peers.sh FOLDER`.
#
# FOLDER then holds peers.tar.xz, fla.tar.xz (flash-linear-attention, which upstream's code uses wherever it can be
# imported), triton.tar.xz (a Triton whose compiler takes its backward on Hopper) and environment.sh, to be sourced where
# the GPU is: `. FOLDER/environment.sh` for the peers, and `. FOLDER/environment.sh fla triton` for these, too. Packages
# are for Python 3.12, without what they need. platformdirs is one that this package itself needs. A checkout of
# batch-invariant-ops (github.com/thinking-machines-lab) is packed if BATCH_INVARIANT_OPS names one.
set -euo pipefail

[ $# = 1 ] || {
	echo "usage: peers.sh FOLDER" >&2
	exit 1
}
packages=(
	einops==0.8.2 liger-kernel==0.8.5 trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 platformdirs==4.5.0
)
platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform any)
mkdir -p "$1"
out=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

unpacked() { # FOLDER PACKAGE...
	local folder=$1
	shift
	"${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 "${platforms[@]}" \
		-d "$work/wheels-$folder" "$@"
	for wheel in "$work/wheels-$folder"/*.whl; do
		"${PYTHON:-python3}" -m zipfile -e "$wheel" "$work/$folder"
	done
}

unpacked peers "${packages[@]}"
if [ -n "${BATCH_INVARIANT_OPS:-}" ]; then
	cp -r "$BATCH_INVARIANT_OPS/batch_invariant_ops" "$work/peers/"
fi
tar cJf "$out/peers.tar.xz" -C "$work" peers
unpacked fla fla-core==0.6.0
tar cJf "$out/fla.tar.xz" -C "$work" fla

unpacked triton triton==3.7.1
# What compiles for other GPUs, and what only looks at code, is most of it.
nvidia=$work/triton/triton/backends/nvidia
rm -rf "$work"/triton/triton/backends/amd/lib "$nvidia"/bin/{ptxas-blackwell,cuobjdump,nvdisasm} "$nvidia"/lib/cupti
find "$work/triton" -name '*.so' -exec strip --strip-unneeded {} + || true
chmod +x "$nvidia/bin/ptxas"
XZ_OPT="-9 -T0" tar cJf "$out/triton.tar.xz" -C "$work" triton

cat >"$out/environment.sh" <<'END'
own=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for name in peers "$@"; do
	[ -d "/tmp/$name" ] || tar xJf "$own/$name.tar.xz" -C /tmp
	export PYTHONPATH=/tmp/$name${PYTHONPATH:+:$PYTHONPATH}
done
END
ls -l "$out"
