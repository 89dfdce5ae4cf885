#!/bin/bash
# Packs SonicMoE and its kernels for an H200, on a machine without a GPU: `benchmarks/sonic/build.sh FOLDER`.
#
# FOLDER then holds sonic.tar.xz (the packages), sonic_cache.tar.xz (the kernels) and environment.sh, to be sourced
# where the GPU is. PYTHON names a Python 3.12. What an earlier run left in /tmp/sonic, /tmp/sonic_env and
# /tmp/sonic_cache is used again: remove them after a change of versions.
set -euo pipefail

[ $# = 1 ] || {
	echo "usage: build.sh FOLDER" >&2
	exit 1
}
python=${PYTHON:-python3.12}
# The caches' keys hold the versions of Python and Triton: these are the ones beside the GPU. torch brings Triton 3.6.0.
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || {
	echo "build.sh: '$python' is no Python 3.12; set PYTHON to one" >&2
	exit 1
}
torch=2.11.0
packages=(
	sonic-moe==0.1.2.post1 quack-kernels==0.3.11 nvidia-cutlass-dsl==4.4.2 nvidia-cutlass-dsl-libs-base==4.4.2
	apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5
)
platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform any)

mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
# Settings of Triton would end in its keys; bytecode would be packed.
unset PYTHONPATH ${!TRITON_@}
export PYTHONDONTWRITEBYTECODE=1

# 1. The environment that compiles.
if [ ! -e /tmp/sonic_env/complete ]; then
	rm -rf /tmp/sonic_env
	"$python" -m venv /tmp/sonic_env
	/tmp/sonic_env/bin/pip install -q torch==$torch numpy cuda-python
	touch /tmp/sonic_env/complete
fi

# 2. The packages: their files only, without what they need, which is beside the GPU already.
if [ ! -d /tmp/sonic ]; then
	rm -rf /tmp/sonic.part
	mkdir -p /tmp/sonic.part/wheels /tmp/sonic.part/sonic
	/tmp/sonic_env/bin/pip download -q --no-deps --only-binary=:all: --python-version 3.12 "${platforms[@]}" \
		-d /tmp/sonic.part/wheels "${packages[@]}"
	for wheel in /tmp/sonic.part/wheels/*.whl; do
		/tmp/sonic_env/bin/python -m zipfile -e "$wheel" /tmp/sonic.part/sonic
	done
	mv /tmp/sonic.part/sonic /tmp/sonic
	rm -rf /tmp/sonic.part
fi

# 3. The file to source. Triton's cache holds absolute paths: it lies in the same folder on both machines.
cat >"$out/environment.sh" <<'END'
sonic=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ -d /tmp/sonic ] || tar xJf "$sonic/sonic.tar.xz" -C /tmp
[ -d /tmp/sonic_cache ] || tar xJf "$sonic/sonic_cache.tar.xz" -C /tmp
export PYTHONPATH=/tmp/sonic:/tmp/sonic/nvidia_cutlass_dsl/python_packages${PYTHONPATH:+:$PYTHONPATH}
export QUACK_CACHE_DIR=/tmp/sonic_cache/quack TRITON_CACHE_DIR=/tmp/sonic_cache/triton
# No workers: each would import PyTorch to compile what is compiled.
export QUACK_COMPILE_WORKERS=1
END

# 4. The kernels: minutes at first, seconds when they are there.
mkdir -p /tmp/sonic_cache
. "$out/environment.sh"
export QUACK_ARCH=sm_90 CUTE_DSL_ARCH=sm_90a
/tmp/sonic_env/bin/python -m benchmarks.sonic.compile
find /tmp/sonic_cache/quack -name '*.lock' -delete
# Triton loads the binaries and reads the .json beside them; the steps between are for reading.
find /tmp/sonic_cache/triton \( -name '*.ttir' -o -name '*.ttgir' -o -name '*.llir' -o -name '*.ptx' \
	-o -name '*.source' \) -delete
/tmp/sonic_env/bin/python -m benchmarks.sonic.check --write

# 5. The archives. Of the packages: 54 MB, in minutes.
if [ ! "$out/sonic.tar.xz" -nt /tmp/sonic ]; then
	tar cf - -C /tmp sonic | xz -9 >"$out/sonic.tar.xz.part"
	mv "$out/sonic.tar.xz.part" "$out/sonic.tar.xz"
fi
tar cf - -C /tmp sonic_cache | xz -9 >"$out/sonic_cache.tar.xz"
ls -l "$out"
