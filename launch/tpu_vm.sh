#!/bin/bash
# Runs a jaxvlm command on every host of a Cloud TPU slice.
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: launch/tpu_vm.sh --tpu=NAME --zone=ZONE [--project=ID] [--install=SPEC]
                        [--cache=FOLDER] [--dry_run] -- ARGUMENTS OF jaxvlm

Runs `jaxvlm ARGUMENTS` on all hosts of the TPU VM slice NAME, one process a host:

  launch/tpu_vm.sh --tpu=v5e-16 --zone=us-central1-a -- \
      train --config=configs/quickstart.py --workdir=/mnt/shared/runs/first

  --install=SPEC   first `pip install SPEC` on all hosts, e.g. 'jaxvlm[tpu]'
  --cache=FOLDER   compiled programs, shared by all hosts (a gs:// folder works);
                   default: ~/.cache/jaxvlm/xla on each host
  --dry_run        print the gcloud command, run nothing

The workdir must be a folder that all hosts see: a mounted Filestore or bucket (gcsfuse). To resume after a
preemption, run the same command again.
TEXT
}

tpu="" zone="" project="" install="" dry_run=0
# The tilde is the remote host's.
# shellcheck disable=SC2088
cache='~/.cache/jaxvlm/xla'
while [[ $# -gt 0 ]]; do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --tpu=*) tpu="${1#*=}" ;;
    --zone=*) zone="${1#*=}" ;;
    --project=*) project="${1#*=}" ;;
    --install=*) install="${1#*=}" ;;
    --cache=*) cache="${1#*=}" ;;
    --dry_run) dry_run=1 ;;
    --) shift && break ;;
    *) echo "tpu_vm.sh: $1 is not an option; try --help" >&2 && exit 2 ;;
  esac
  shift
done
if [[ -z "$tpu" || -z "$zone" || $# -eq 0 ]]; then
  echo "tpu_vm.sh: --tpu, --zone and, after --, a jaxvlm command are needed; try --help" >&2
  exit 2
fi

# Each argument is quoted once more, for the shell on the hosts.
remote="JAXVLM_DISTRIBUTED=auto JAX_COMPILATION_CACHE_DIR=${cache} jaxvlm"
for argument in "$@"; do
  remote+=" $(printf '%q' "$argument")"
done
if [[ -n "$install" ]]; then
  remote="pip install --quiet $(printf '%q' "$install") && $remote"
fi

call=(gcloud compute tpus tpu-vm ssh "$tpu" "--zone=$zone" --worker=all "--command=$remote")
if [[ -n "$project" ]]; then
  call+=("--project=$project")
fi
if [[ $dry_run -eq 1 ]]; then
  printf '%q ' "${call[@]}"
  echo
  exit 0
fi
exec "${call[@]}"
