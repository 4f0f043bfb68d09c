import json
import shutil
import socket
import sys
import tempfile
import unittest
from pathlib import Path

from real_processes import MAIN, TORCHRUN, run

AGENT = " ".join([*TORCHRUN, "--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d"])
PROBE = "ip link set lo up && ip link add cable_a type veth peer name cable_b && unshare --net true"

# Two hosts without a second machine: two network namespaces, each with a loopback of its own, and a cable between them.
# The first is that of this script; the second begins with `unshare`. Each waits for the other at a named pipe.
TWO_NAMESPACES = f"""
set -e
mkfifo second_is_there cable_is_there
unshare --net bash -c '
    set -e
    echo > second_is_there
    read < cable_is_there
    ip link set lo up
    ip addr add 10.77.0.2/24 dev cable_b
    ip link set cable_b up
    export GLOO_SOCKET_IFNAME=cable_b
    {AGENT} --rdzv-endpoint=10.77.0.1:29400 --rdzv-conf=is_host=false --local-addr=10.77.0.2 "$1" --out shared
' bash "$1" > second.log 2>&1 &
second=$!
read < second_is_there
ip link set lo up
ip link add cable_a type veth peer name cable_b netns $second
ip addr add 10.77.0.1/24 dev cable_a
ip link set cable_a up
echo > cable_is_there
export GLOO_SOCKET_IFNAME=cable_a
{AGENT} --rdzv-endpoint=10.77.0.1:29400 --rdzv-conf=is_host=true --local-addr=10.77.0.1 "$1" --out shared \\
    > first.log 2>&1
wait $second
"""

# The same on one network, where namespaces are not permitted.
TWO_AGENTS = f"""
export GLOO_SOCKET_IFNAME=$3
{AGENT} --rdzv-endpoint=127.0.0.1:$2 --local-addr=127.0.0.1 "$1" --out shared > second.log 2>&1 &
second=$!
{AGENT} --rdzv-endpoint=127.0.0.1:$2 --local-addr=127.0.0.1 "$1" --out shared > first.log 2>&1 || exit 1
wait $second
"""


def free_port() -> int:
    """A port that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@unittest.skipIf(sys.platform == "win32" or shutil.which("bash") is None, "needs bash")
class TestTwoHosts(unittest.TestCase):
    """Two agents, one rank each, one model: bit for bit what two ranks of one host train."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def rows(self, out: str) -> list:
        lines = (self.folder / out / "metrics.jsonl").read_text().splitlines()
        return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]

    def assert_one_model(self, code: int, out: str) -> None:
        """The agents' run was good, only the first told of it, and one host does the same."""
        first, second = (self.folder / name for name in ("first.log", "second.log"))
        logs = out + "".join(path.read_text() for path in (first, second) if path.exists())
        self.assertEqual(code, 0, logs)
        self.assertEqual(logs.count("RESUME VERIFIED"), 1)
        alone, out = run([sys.executable, MAIN, "--world-size", 2, "--out", "alone"], self.folder)
        self.assertEqual(alone, 0, out)
        self.assertEqual(len(self.rows("shared")), 20)
        self.assertEqual(self.rows("shared"), self.rows("alone"))

    def test_in_two_network_namespaces(self):
        if not all(map(shutil.which, ("unshare", "ip"))):
            self.skipTest("needs unshare and ip")
        namespace = ["unshare", "--user", "--map-root-user", "--net", "bash", "-c"]
        code, out = run([*namespace, PROBE], self.folder)
        if code != 0:
            self.skipTest(f"network namespaces are not permitted here: {out.strip()}")
        self.assert_one_model(*run([*namespace, TWO_NAMESPACES, "two hosts", MAIN], self.folder))

    def test_two_agents_on_one_network(self):
        loopback = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
        for _ in range(3):  # a port that was free may be so no longer
            code, out = run(["bash", "-c", TWO_AGENTS, "two hosts", MAIN, free_port(), loopback], self.folder)
            if code == 0 or "ddress already in use" not in (self.folder / "first.log").read_text():
                break
        self.assert_one_model(code, out)


if __name__ == "__main__":
    unittest.main()
