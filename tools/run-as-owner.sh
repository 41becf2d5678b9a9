#!/bin/sh
# Become the owner of /outputs, give up every capability for good, and only then run the command. Files then belong to
# the owner of the mounted directory, although nobody told the container which user that is. The identity `detected` of
# compose.user.yaml starts here.
set -eu
if [ ! -d /outputs ]; then
  echo "run-as-owner: /outputs is not mounted; mount the directory for runs there" >&2
  exit 4
fi
# tini becomes process 1: an init that stayed root would need CAP_KILL to pass a signal on to another user's process.
exec setpriv --reuid "$(stat -c %u /outputs)" --regid "$(stat -c %g /outputs)" --clear-groups \
  --inh-caps=-all --ambient-caps=-all --bounding-set=-all --no-new-privs \
  tini -- "$@"
