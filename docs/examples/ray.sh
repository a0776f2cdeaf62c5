#!/bin/bash
# Train on the nodes of a Ray cluster.
#
#   bash ray.sh head                       on the first node: starts Ray and prints the token
#   bash ray.sh join HEAD_ADDRESS TOKEN    on every other node
#   bash ray.sh train HEAD_ADDRESS CONFIG.toml RUN_FOLDER NUM_RANKS    on the first node again
set -euo pipefail

# A head asks every other process for its token. A node or a driver sends one only with this setting.
export RAY_AUTH_MODE=token

case $1 in
  head)
    ray get-auth-token --generate # kept in ~/.ray/auth_token
    ray start --head --port 6379 --disable-usage-stats
    ;;
  join)
    export RAY_AUTH_TOKEN=$3
    ray start --address "$2:6379" --disable-usage-stats
    ;;
  train)
    export RAY_ADDRESS=$2:6379
    bytescale train "$3" --launch ray --parallel.ranks "$5" --trainer.run-dir "$4"
    ;;
esac
