# shellcheck shell=bash
# Processes that outlive this script: started once, found again, stopped by process id. Sourced by cluster.sh.
#
# A process id alone names a stranger once it is reused, so the file keeps the start time beside it (proc(5), field 22).

# Sets STATE and SINCE of a process; without a fork, because it is asked often and the machine may be busy.
look_at() {
  local stat fields
  { read -r stat <"/proc/$1/stat"; } 2>/dev/null || return 1
  # its name may hold blanks and brackets
  read -ra fields <<<"${stat##*) }"
  STATE=${fields[0]} SINCE=${fields[19]}
}

started_at() { look_at "$1" && echo "$SINCE"; }

# Prints the process id of a daemon that runs.
pid_of() {
  local pid since
  read -r pid since 2>/dev/null <"$DIR/run/$1.pid" || return 1
  is_running "$pid" "$since" && echo "$pid"
}

# is_running PID START_TIME: whether that very process runs.
is_running() {
  [ -n "${2:-}" ] && look_at "$1" && [ "$SINCE" = "$2" ] && [ "$STATE" != Z ]
}

STARTED=()

# start NAME COMMAND…: nothing happens where it runs already.
start() {
  local name=$1 pid
  shift
  pid_of "$name" >/dev/null && return
  setsid nohup "$@" >>"$DIR/logs/$name.log" 2>&1 </dev/null 9>&- &
  pid=$!
  echo "$pid $(started_at "$pid")" >"$DIR/run/$name.pid"
  STARTED+=("$name")
}

# stop NAME…: SIGTERM to all of them, then SIGKILL to what is left after ten seconds.
stop() {
  local name pid pids=()
  for name in "$@"; do
    pid=$(pid_of "$name") && pids+=("$pid") && { kill "$pid" 2>/dev/null || true; }
  done
  gone 10 "${pids[@]}" || kill -KILL "${pids[@]}" 2>/dev/null || true
  gone 10 "${pids[@]}" || die "process ${pids[*]} does not end, not even by SIGKILL"
  for name in "$@"; do rm -f "$DIR/run/$name.pid"; done
}

# discard NAME…: SIGKILL, for daemons whose state is deleted next, and for their children. After SIGTERM an API server waits for
# its watches to end.
discard() {
  local name pid pids=()
  for name in "$@"; do
    # `start` made it the leader of a process group
    pid=$(pid_of "$name") && pids+=("$pid") && { kill -KILL -- "-$pid" 2>/dev/null || true; }
  done
  gone 10 "${pids[@]}" || die "process ${pids[*]} does not end, not even by SIGKILL"
  for name in "$@"; do rm -f "$DIR/run/$name.pid"; done
}

# gone SECONDS PID…: whether all of them end in time.
gone() {
  local deadline=$((SECONDS + $1)) pid
  shift
  for pid in "$@"; do
    while look_at "$pid" && [ "$STATE" != Z ]; do
      [ "$SECONDS" -lt "$deadline" ] || return 1
      sleep 0.1
    done
  done
}

# until_ok WHAT SECONDS COMMAND…: the condition, or an end with the words of what never came true.
until_ok() {
  local what=$1 deadline=$((SECONDS + $2)) name
  shift 2
  until "$@" >/dev/null 2>&1; do
    for name in "${STARTED[@]}"; do
      pid_of "$name" >/dev/null || die "$name has ended: $(tail -n 3 "$DIR/logs/$name.log")"
    done
    [ "$SECONDS" -lt "$deadline" ] || die "$what: not within its time; the logs are in $DIR/logs"
    sleep 0.2
  done
}
