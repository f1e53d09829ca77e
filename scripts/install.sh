#!/usr/bin/env bash
# Creates .venv in the checkout and installs real-ray with its exact requirements into it.
# Usage: scripts/install.sh [--dev]     --dev adds what tests and checks need
#
# PYTHON=path chooses the interpreter. .venv/install.state holds "installing", or what was
# installed last: a digest of everything the result depends on, and then "dev" if that was asked for.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv="$PWD/.venv"
readonly state="$venv/install.state" log="$venv/install.log"
readonly need_gb=6 # 3.5 GB installed, and the downloads while pip unpacks them
readonly torch_index="https://download.pytorch.org/whl/cpu"

say() { printf 'real-ray: %s\n' "$1"; }
die() {
    printf 'real-ray: %s\n' "$1" >&2
    exit 1
}

# "3.11.7" if the interpreter runs; a pyenv shim may exist and yet fail.
version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }

is_supported() { [[ "$1" == 3.11.* || "$1" == 3.12.* ]]; }

find_python() {
    local candidates=(python3.11 python3.12 python3 python) candidate version found="" no_venv=""
    if [[ -n "${PYTHON:-}" ]]; then candidates=("$PYTHON"); fi
    for candidate in "${candidates[@]}"; do
        version="$(version_of "$candidate")" || continue
        if ! is_supported "$version"; then
            found+="${found:+, }$candidate is $version"
        elif ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            no_venv="${no_venv:-$candidate ${version%.*}}"
        else
            printf '%s\n' "$candidate"
            return
        fi
    done
    if [[ -n "$no_venv" ]]; then
        die "${no_venv% *} has no venv module; install it (Debian, Ubuntu: apt install python${no_venv#* }-venv) and try again."
    fi
    die "Python 3.11 or 3.12 is needed and was not found (${found:-${candidates[*]}: none runs}); install one, or name it with PYTHON=/path/to/python3.11."
}

check_platform() {
    case "$(uname -s)-$(uname -m)" in
    Linux-x86_64 | Linux-aarch64 | Linux-arm64) ;;
    Darwin-*) die "vLLM's CPU engine has no build for macOS; run real-ray in a Linux container or virtual machine." ;;
    *) die "real-ray needs Linux on x86-64 or aarch64, and this is $(uname -s) on $(uname -m)." ;;
    esac
}

check_disk() {
    local free_kb used_kb=0
    free_kb="$(df -Pk . | awk 'NR == 2 { print $4 }')"
    if [[ -d "$venv" ]]; then used_kb="$(du -sk "$venv" | cut -f1)"; fi
    if ((free_kb + used_kb < need_gb * 1024 * 1024)); then
        die "the disk is too full: $PWD has $((free_kb / 1024 / 1024)) GB free, and the installation needs $need_gb GB."
    fi
}

is_offline() {
    grep -qiE 'connection broken by|Max retries exceeded|Could not fetch URL|Read timed out|name resolution|Network is unreachable' <<<"$1"
}

# One sentence for what pip wrote, by the most telling of its lines.
explain() {
    local output="$1"
    if grep -qiE 'No space left on device|Disk quota exceeded' <<<"$output"; then
        die "the disk ran full; free about $need_gb GB on the file system of $PWD and try again."
    elif is_offline "$output"; then
        die "no network: pip cannot reach its package index; check the connection or the proxy settings and try again (details in .venv/install.log)."
    fi
    local last
    last="$(grep -iE '^ *error' <<<"$output" || grep . <<<"$output" || true)"
    die "installation failed: ${last##*$'\n'}; see .venv/install.log"
}

run_pip() {
    "$venv/bin/python" -m pip --no-input --disable-pip-version-check install --no-deps "$@" 2>&1 | tee -a "$log"
}

pip_install() {
    local output
    output="$(run_pip "$@")" || explain "$output"
}

# PyTorch's own index is a second choice: a mirror or a local wheel may be what works here.
install_torch() {
    local torch output
    torch="$(grep '^torch==' requirements/cpu.txt)"
    if output="$(run_pip "$torch")"; then return; fi
    if is_offline "$output" || ! grep -qE 'No matching distribution|ResolutionImpossible' <<<"$output"; then
        explain "$output"
    fi
    pip_install --extra-index-url "$torch_index" "$torch"
}

install_everything() {
    local files=(-r requirements/cpu.txt)
    if [[ -n "$dev" ]]; then files+=(-r requirements/dev.txt); fi
    # pip unpacks gigabytes: keep them on the file system that was checked.
    export TMPDIR="$venv/tmp"
    mkdir -p "$TMPDIR"
    say "1/3 PyTorch"
    install_torch
    say "2/3 vLLM, Ray, DeepSpeed and what they need"
    # Source packages build with the pinned setuptools, so that no unpinned one is fetched.
    pip_install "$(grep '^setuptools==' requirements/cpu.txt)"
    pip_install --no-build-isolation "${files[@]}"
    say "3/3 real-ray"
    pip_install --no-build-isolation -e .
    rm -rf "$TMPDIR"
}

# Everything that the content of .venv depends on.
digest() {
    {
        cat requirements/cpu.txt requirements/dev.txt pyproject.toml scripts/install.sh
        printf '%s\n' "$venv" "$(version_of "$venv/bin/python")"
    } | sha256sum | cut -d ' ' -f 1
}

create_venv() {
    local python
    python="$(find_python)"
    check_disk
    say "installing into .venv with Python $(version_of "$python") (takes a few minutes and 3.5 GB)"
    rm -rf .venv/bin # first, so that a venv that is cleared by half does not look usable
    "$python" -m venv --clear "$venv" >/dev/null 2>&1 ||
        die "installation failed: '$python -m venv $venv' does not work."
}

is_chosen_python() {
    [[ -z "${PYTHON:-}" || "$(version_of "$PYTHON")" == "$(version_of "$venv/bin/python")" ]]
}

# What was interrupted may be half written, and what was moved has stale paths in its scripts.
is_usable_venv() {
    is_supported "$(version_of "$venv/bin/python")" && is_chosen_python &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1 || return 1
    if [[ -e "$state" ]]; then
        [[ "$(<"$state")" != installing ]] && grep -qF " $venv" "$venv/pyvenv.cfg"
    fi
}

is_up_to_date() {
    local installed current
    installed="$(cat "$state" 2>/dev/null)" && current="$(digest)" && is_chosen_python &&
        [[ "$installed" == "$current dev" || "$installed" == "$current $dev" ]]
}

main() {
    dev=""
    case "${1:-}" in
    "") ;;
    --dev) dev=dev ;;
    *) die "unknown option $1; usage: scripts/install.sh [--dev]" ;;
    esac
    check_platform
    trap 'die "interrupted; run it again, and it repairs what is there."' INT TERM
    if [[ -n "$(command -v flock)" ]]; then # two makes at once: the second waits for the first
        exec 9<scripts/install.sh
        flock 9
    fi
    if is_up_to_date; then
        say ".venv is up to date"
        return
    fi
    if is_usable_venv; then
        check_disk
        say "updating .venv"
    else
        create_venv
    fi
    echo installing >"$state"
    : >"$log"
    install_everything
    printf '%s %s\n' "$(digest)" "$dev" >"$state"
    say "installed; try .venv/bin/real-ray --help"
}

main "$@"
