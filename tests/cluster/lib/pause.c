/* Process 1 of a pod's sandbox: waits for the end, and reaps what is handed down to it. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void quit(int signal) {
  (void)signal;
  _exit(0);
}

static void reap(int signal) {
  (void)signal;
  while (waitpid(-1, 0, WNOHANG) > 0) {
  }
}

int main(void) {
  signal(SIGINT, quit);
  signal(SIGTERM, quit);
  signal(SIGCHLD, reap);
  for (;;) pause();
}
