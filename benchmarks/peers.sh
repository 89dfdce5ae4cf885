#!/bin/bash
# Packs the peers that benchmarks measure beside ours, for a GPU machine without a network: `benchmarks/peers.sh FOLDER`.
#
# FOLDER then holds peers.tar.xz, fla.tar.xz (flash-linear-attention, which upstream's code uses wherever it can be
# imported), triton.tar.xz (a Triton whose compiler takes its backward on Hopper), unsloth.tar.xz (which wants other
# releases of TRL and datasets than ours), deepspeed.tar.xz (for ALST) and environment.sh, to be sourced where the GPU
# is: `. FOLDER/environment.sh` for the peers, and `. FOLDER/environment.sh fla triton` for these, too. Packages are for Python 3.12, without what
# they need. platformdirs is one that this package itself needs. A checkout of
# batch-invariant-ops (github.com/thinking-machines-lab) is packed if BATCH_INVARIANT_OPS names one.
set -euo pipefail

[ $# = 1 ] || {
	echo "usage: peers.sh FOLDER" >&2
	exit 1
}
packages=(
	einops==0.8.2 liger-kernel==0.8.5 trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 platformdirs==4.5.0
)
platforms=()
for tag in manylinux_2_{28,27,24,17}_x86_64 manylinux2014_x86_64 any; do
	platforms+=(--platform "$tag")
done
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

# Of bitsandbytes, which Unsloth's loader imports, the library for CUDA 13; of Unsloth, what its training imports.
unpacked unsloth unsloth==2026.10.9 unsloth_zoo==2026.10.9 trl==1.15.0 datasets==4.8.5 dill==0.4.1 \
	multiprocess==0.70.19 cut_cross_entropy==25.1.1 bitsandbytes==0.50.2 torchao==0.18.0 msgspec==0.22.0 \
	pydantic==2.14.4 pydantic_core==2.50.5 typing_inspection==0.4.5 annotated_types==0.8.0 platformdirs==4.5.0
find "$work/unsloth/bitsandbytes" -name '*.so' ! -name '*_cuda130.so' ! -name '*_cpu.so' -delete
rm -rf "$work"/unsloth/{studio,unsloth_cli}
tar cJf "$out/unsloth.tar.xz" -C "$work" unsloth

# DeepSpeed comes as source; its Python alone is enough for what is measured.
unpacked deepspeed hjson==3.1.0 msgpack==1.2.4 py-cpuinfo==9.0.0 psutil==7.2.2 pydantic==2.14.4 \
	pydantic_core==2.50.5 typing_inspection==0.4.5 annotated_types==0.8.0
"${PYTHON:-python3}" -m pip download -q --no-deps --no-binary=:all: -d "$work" deepspeed==0.19.8
tar xzf "$work"/deepspeed-0.19.8.tar.gz -C "$work/deepspeed" --strip-components 1 \
	deepspeed-0.19.8/{deepspeed,op_builder,accelerator,version.txt}
tar cJf "$out/deepspeed.tar.xz" -C "$work" deepspeed

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
