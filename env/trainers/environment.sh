# shellcheck shell=bash
# Sourced by the scripts of this folder. Each is called as
#   bash env/trainers/NAME CACHE [FOLDER...]
# It builds the environment CACHE/NAME once, apart from the kit's, then has the trainer's own parser read the file that
# `kit render` wrote into each FOLDER. It prints a JSON object: versions, and the answer for each folder's name.
# An environment that only parses has the trainer without its dependencies, and then those that the parser imports.
set -euo pipefail
name=$(basename "$0")
environment=${1:?the first argument is a folder for environments}/$name
shift
python=$environment/bin/python

# build TRAINER==VERSION PACKAGE...: torch first, in its own call, so that a wheel on a local index is taken.
build() {
  [ ! -e "$environment/.ready" ] || return 0
  "${PYTHON:-python3}" -m venv "$environment"
  {
    "$python" -m pip install --quiet --disable-pip-version-check --no-input torch==2.13.0
    "$python" -m pip install --quiet --disable-pip-version-check --no-input --no-deps "$1"
    "$python" -m pip install --quiet --disable-pip-version-check --no-input torch==2.13.0 "${@:2}"
  } >&2
  touch "$environment/.ready"
}

# parse PACKAGES CODE FOLDER...: CODE is Python that defines `parse(folder)`, which raises for a file that is refused.
parse() {
  HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=offline AXOLOTL_DO_NOT_TRACK=1 DO_NOT_TRACK=1 \
    RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=${MASTER_PORT:-29611} \
    "$python" - "$@" <<'PYTHON'
import contextlib, importlib.metadata, json, sys, traceback
from pathlib import Path

packages, code, *folders = sys.argv[1:]
answers = {}
with contextlib.redirect_stdout(sys.stderr):
    exec(code)
    for folder in map(Path, folders):
        try:
            parse(folder)
            answers[folder.name] = "accepted"
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            answers[folder.name] = f"{type(error).__name__}: {error}"
versions = {package: importlib.metadata.version(package).partition("+")[0] for package in packages.split()}
print(json.dumps({"versions": versions, "files": answers}))
PYTHON
}
