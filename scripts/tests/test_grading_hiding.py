"""A run sees nobody else's files: no submission, report, class list or key, and no solution."""

import multiprocessing
import os
import sys
import tempfile
import unittest
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from grading import hiding
from grading.isolation import Isolation
from grading_course import RIGHT, RINGS, ROSTER, Grading
from test_grading_sandbox import FULL, PLAIN, run

HERE = Path(__file__).resolve()


@unittest.skipUnless(FULL.hidden, "files cannot be hidden here")
class TestSandbox(unittest.TestCase):
    def printed(self, body) -> list[str]:
        ended = run(body, FULL)
        self.assertEqual((ended.reason, ended.exit_code), ("exited", 0), ended.output)
        return ended.output.splitlines()

    def test_the_course_is_not_there(self):
        def body(channel):
            for path in (HERE, HERE.parents[2] / "phases", HERE.parents[2] / ".git", HERE.parents[1] / "course.py"):
                print(path.exists())

        self.assertEqual(self.printed(body), ["False"] * 4)

    def test_of_the_temporary_folder_only_its_own_is_there(self):
        file = tempfile.NamedTemporaryFile(prefix="of-somebody-else-")
        self.addCleanup(file.close)

        def body(channel):
            print(Path(file.name).exists(), Path.cwd().is_dir())
            Path("/tmp/mine").write_text("x")
            print(Path("/tmp/mine").read_text())

        self.assertEqual(self.printed(body), ["False True", "x"])
        self.assertFalse(Path("/tmp/mine").exists())

    def test_a_folder_of_the_first_process_leads_nowhere(self):
        def body(channel):
            for pid in (1, os.getpid(), os.getppid()):
                try:
                    print(Path(f"/proc/{pid}/root{HERE}").exists(), Path(f"/proc/{pid}/cwd/grading").exists())
                except OSError as error:
                    print(error.strerror)

        self.assertNotIn("True", " ".join(self.printed(body)))

    def test_no_disk_is_a_file(self):
        def body(channel):
            print(sorted(os.listdir("/dev")))
            with open("/dev/null", "w") as null, open("/dev/urandom", "rb") as random:
                print(null.write("x"), len(random.read(3)), os.path.exists("/dev/fd/1"))

        devices = ["fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom", "zero"]
        self.assertEqual(self.printed(body), [str(devices), "1 3 True"])

    def test_python_still_imports_and_starts_others(self):
        resource_tracker.ensure_running()  # its pipe is closed in the run, which has to start its own
        forkserver.ensure_running()

        def body(channel):
            import sqlite3  # noqa: F401, not imported before
            import subprocess
            import wave  # noqa: F401

            print(subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True).stdout.strip())
            for method in ("spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(pool.map(abs, [-2, 3]))

        self.assertEqual(self.printed(body), ["1", "[2, 3]", "[2, 3]"])


class TestPlan(unittest.TestCase):
    def test_a_folder_of_the_system_is_not_covered_with_what_lies_in_it(self):
        for path, folder in (
            ("/etc/roster.csv", None),
            ("/usr/local/roster.csv", None),
            ("/roster.csv", None),
            ("/usr/src/app/roster.csv", "/usr/src/app"),
            ("/srv/roster.csv", "/srv"),
            ("/nowhere/class/roster.csv", "/nowhere/class"),
        ):
            self.assertEqual(hiding.with_folders([Path(path)]), sorted(filter(None, [path, folder])), path)

    def test_links_count_as_what_they_lead_to(self):
        with tempfile.TemporaryDirectory() as holder:
            real, link = Path(holder).resolve() / "real", Path(holder) / "link"
            real.mkdir()
            link.symlink_to(real)
            self.assertEqual(hiding.with_folders([link / "r.csv"]), [str(real), str(real / "r.csv")])

    def test_what_python_needs(self):
        found = hiding.python_paths()
        self.assertIn(os.path.realpath(sys.base_prefix), found)
        self.assertIn(os.path.realpath(os.path.dirname(unittest.__path__[0])), found)
        self.assertEqual([path for path in found if str(HERE).startswith(f"{path}/")], [])

    @unittest.skipUnless(FULL.hidden, "files cannot be hidden here")
    def test_python_in_the_folder_that_is_hidden(self):
        with tempfile.TemporaryDirectory() as holder:
            folder = Path(holder).resolve()
            for name in ("venv/lib/one.txt", "class/key.csv", "venv/class/key.csv"):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(name)
            covers = [str(folder), str(folder / "venv/class")]
            keep = [*hiding.python_paths(), str(folder / "venv")]

            def body(channel):
                print(
                    [(folder / name).exists() for name in ("venv/lib/one.txt", "class/key.csv", "venv/class/key.csv")]
                )

            with mock.patch.object(hiding, "python_paths", lambda: keep):
                ended = run(body, FULL, hide=covers)
        self.assertEqual(ended.output, "[True, False, False]\n")


READ = """import glob
    found = []
    for name in {names!r}:
        for path in glob.glob(name, recursive=True):
            try:
                found.append(open(path).read())
            except OSError:
                pass
    raise ValueError(chr(10).join(found))"""

SEARCH = """import re
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        found = 0
        for row in maps.read().splitlines():
            begin, end = (int(text, 16) for text in row.split()[0].split("-"))
            try:
                memory.seek(begin)
                found += len(re.findall(b"some[b]ody else's line", memory.read(end - begin)))
            except (OSError, OverflowError, ValueError):
                pass
    raise ValueError(found)"""


@unittest.skipUnless(FULL.fork, "the sandbox needs Linux")
class TestReports(Grading):
    """What students' code finds on the disk would stand in the report that is given to them."""

    def setUp(self):
        super().setUp()
        self.put("quiz/instructor/key.csv", "the key, of all forms")
        self.put("roster.csv", ROSTER)
        self.put("in/s1/code/mine.py", "secret = 'of another student'\n")
        self.put("out/s1/report.json", "{}")
        names = [
            f"{self.root}/**/key.csv",
            f"{self.root}/roster.csv",
            f"{self.root}/in/s1/code/*",
            f"{self.root}/out/*/*",
            f"{self.root}/{self.WHEELS}/code/rings.py",
        ]
        self.put("in/s2/code/rings.py", RINGS.replace(RIGHT, READ.format(names=names)))

    KIND = "ValueError"

    def message(self) -> str:
        self.assertEqual(self.grade("--resume"), 0, self.err)
        item = self.report("s2")["exercises"][0]
        self.assertEqual(item["evidence"]["observed"].split(":")[0], self.KIND, item)
        return item["evidence"].get("message", "")

    @unittest.skipUnless(FULL.hidden, "files cannot be hidden here")
    def test_nothing_of_the_class_is_found(self):
        self.assertEqual(self.message(), "")
        self.assertIn("saw nobody's files", self.text("out/class.md"))

    @unittest.skipUnless(FULL.hidden, "files cannot be hidden here")
    def test_the_published_solution_is_not_found(self):
        path = f"{self.root}/{self.WHEELS}/code/rings.py"
        compiled = "/tmp/cg-*/**/rings.*.pyc"
        text = f"import glob\n    assert not glob.glob({compiled!r}, recursive=True)\n    "
        text += f"exec(open({path!r}).read(), globals())\n    return turn(ring, steps)"
        self.put("in/s2/code/rings.py", RINGS.replace(RIGHT, text))
        self.KIND = "FileNotFoundError"
        self.assertIn(f"No such file or directory: '{path}'", self.message())

    def test_the_process_remembers_no_other_student(self):
        """One process forks for all of them. Of much text something is left in memory that was freed."""
        lines = "\n".join(f"    # {number}: somebody else's line" for number in range(3000))
        self.put("in/s1/code/rings.py", RINGS.replace(RIGHT, f"{RIGHT}\n{lines}"))
        self.put("in/s2/code/rings.py", RINGS.replace(RIGHT, SEARCH))
        self.assertEqual(self.grade("--resume", "--jobs", "1"), 0, self.err)
        self.assertEqual(self.report("s1")["exercises"][0]["status"], "correct")
        self.assertEqual(self.report("s2")["exercises"][0]["evidence"]["observed"], "ValueError: 0")

    def test_where_nothing_is_hidden_the_table_and_the_report_say_so(self):
        with mock.patch("grading.isolation.probe", lambda folder: PLAIN):
            self.assertIn("the key, of all forms", self.message())
        for name in ("class.md", "s2/report.md"):
            self.assertIn(
                "no mount namespace: practice only, students' code can read your files", self.text(f"out/{name}")
            )
        self.assertEqual(Isolation(fork=True).missing, PLAIN.missing)


if __name__ == "__main__":
    unittest.main()
