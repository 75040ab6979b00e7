"""Every test, in two processes: those that mostly wait beside all others, so that waiting takes nobody's time.

What the waiting ones print comes when they are done. Words after the name go to both, as pytest takes them.
"""

import subprocess
import sys
import tempfile


def main(words):
    """Run both; returns the exit status, which is 0 only where both passed."""
    pytest = [sys.executable, "-m", "pytest", *words]
    with tempfile.TemporaryFile() as said:
        waiting = subprocess.Popen([*pytest, "-m", "waits"], stdout=said, stderr=said)
        try:
            status = subprocess.run([*pytest, "-m", "not waits"]).returncode
            other = waiting.wait()
        except KeyboardInterrupt:
            waiting.wait()  # it was interrupted too
            return 130
        finally:
            said.seek(0)
            print("tests that mostly wait:", flush=True)
            sys.stdout.buffer.write(said.read())
            sys.stdout.flush()
    return status or other


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
