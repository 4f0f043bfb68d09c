"""Submissions as the platforms hand them out, and zips that mean no good."""

import io
import os
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from faults import UserError
from grading import handin
from grading.handin import read_tree, read_zip
from grading.submissions import read_class
from roster import read_roster

ROSTER = """id,name,email
s1,Anna Lee,anna@x.org
s2,Bo van Dyk,bo@x.org
s3,José Núñez,jose@x.org
s4,Anna Lea,lea@x.org
"""


def zipped(files: dict[str, bytes | str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


class Folder(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.root = Path(holder.name)
        self.put("roster.csv", ROSTER)
        self.roster = read_roster(self.root / "roster.csv")

    def put(self, name: str, data: bytes | str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)

    def handed(self, name: str = "in", roster=True) -> dict[str, dict[str, bytes] | None]:
        self.of = read_class(self.root / name, self.roster if roster else None)
        return {work.student.id: work.handed and work.handed.files for work in self.of.works}


class TestPlatforms(Folder):
    def test_canvas(self):
        self.put("in/leeanna_11_500_rings.py", "old")
        self.put("in/leeanna_LATE_11_501_rings-1.py", "new")
        self.put("in/leeanna_11_500_other.py", "kept")
        self.put("in/vandykbo_12_7_all.zip", zipped({"code/rings.py": "z"}))
        self.put("in/nunezjose_13_9_rings-2.py", "b")
        self.put("in/nunezjose_13_9_rings-10.py", "c")
        self.put("in/nobody_14_9_rings.py", "c")
        found = self.handed()
        self.assertEqual(found["s1"], {"rings.py": b"new", "other.py": b"kept"})
        self.assertEqual(found["s2"], {"code/rings.py": b"z"})
        self.assertEqual(found["s3"], {"rings.py": b"c"})
        self.assertIsNone(found["s4"])
        self.assertEqual([label for label, _ in self.of.unmatched], ["nobody_14"])
        first = self.of.only("s1")[0].handed
        self.assertEqual((first.late, first.origins["rings.py"]), (True, "leeanna_LATE_11_501_rings-1.py"))
        self.assertEqual(first.replaced, [("leeanna_11_500_rings.py", "leeanna_LATE_11_501_rings-1.py")])
        again = self.of.only("s3")[0].handed.replaced
        self.assertEqual(again, [("nunezjose_13_9_rings-2.py", "nunezjose_13_9_rings-10.py")])

    def test_without_a_roster_students_stand_by_name(self):
        for number, name in enumerate(("deeann", "annlee", "Bodyk", "coxi")):
            self.put(f"in/{name}_{9 - number}_{number}_rings.py", "x")
        self.assertEqual([*self.handed(roster=False)], ["annlee", "Bodyk", "coxi", "deeann"])

    def test_canvas_by_the_id_it_knows(self):
        self.put("in/somebody_2_9_rings.py", "x")
        self.put("roster.csv", "id,name\n2,Anna Lee\n")
        self.roster = read_roster(self.root / "roster.csv")
        self.assertEqual(self.handed(), {"2": {"rings.py": b"x"}})

    def test_canvas_writes_names_without_accents(self):
        for name, written in (("Zoë Łuk", "lukzoe"), ("Søren Æbel", "aebelsoren"), ("Jörg Weiß", "weissjorg")):
            self.put("roster.csv", f"id,name\ns9,{name}\n")
            self.roster = read_roster(self.root / "roster.csv")
            self.put(f"{written}/{written}_5_9_rings.py", "x")
            self.assertEqual(self.handed(written), {"s9": {"rings.py": b"x"}})

    def test_moodle(self):
        self.put("in/Anna Lee_991_assignsubmission_file_/rings.py", "a")
        self.put("in/JOSE NUNEZ_992_assignsubmission_file/deep/rings.py", "j")
        found = self.handed()
        self.assertEqual((found["s1"], found["s3"]), ({"rings.py": b"a"}, {"deep/rings.py": b"j"}))

    def test_gradescope_the_newest_counts(self):
        metadata = """submission_1:
  :submitters:
  - :name: Anna Lee
    :sid: s1
    :email: anna@x.org
  :created_at: 2026-01-03 10:00:00.000000000 Z
submission_2:
  :submitters:
  - :name: Anna Lee
    :sid: s1
  :created_at: 2026-01-02 10:00:00.000000000 Z
submission_3:
  :submitters:
  - :name: Somebody
    :email: bo@x.org
  :created_at: 2026-01-02 10:00:00.000000000 Z
"""
        for number in (1, 2, 3):
            self.put(f"in/export/submission_{number}/rings.py", str(number))
        self.put("in/export/submission_metadata.yml", metadata)
        found = self.handed()
        self.assertEqual((found["s1"], found["s2"]), ({"rings.py": b"1"}, {"rings.py": b"3"}))
        self.assertEqual(self.of.only("s1")[0].superseded, ["submission_2"])

    def test_gradescope_a_group_hands_in_for_each(self):
        metadata = """submission_1:
  :submitters:
  - :name: Anna Lee
    :sid: s1
  - :email: bo@x.org
    :name: Somebody
  :created_at: 2026-01-03 10:00:00.000000000 Z
"""
        self.put("in/submission_1/rings.py", "x")
        self.put("in/submission_metadata.yml", metadata)
        found = self.handed()
        self.assertEqual((found["s1"], found["s2"], found["s3"]), ({"rings.py": b"x"}, {"rings.py": b"x"}, None))
        self.assertEqual(self.of.unmatched, [])

    def test_a_folder_or_zip_a_student(self):
        self.put("in/S1/code/rings.py", "a")
        self.put("in/bo@x.org.zip", zipped({"rings.py": "b"}))
        self.put("in/notes.py", "")
        found = self.handed()
        self.assertEqual((found["s1"], found["s2"]), ({"code/rings.py": b"a"}, {"rings.py": b"b"}))
        self.assertEqual(self.of.stray, ["notes.py"])

    def test_of_two_folders_the_newer_counts(self):
        for name, time in (("s1", 2000), ("Anna Lee", 1000)):
            self.put(f"in/{name}/rings.py", name)
            os.utime(self.root / "in" / name / "rings.py", (time, time))
        self.assertEqual(self.handed()["s1"], {"rings.py": b"s1"})
        self.assertEqual(self.of.only("s1")[0].superseded, ["Anna Lee"])

    def test_the_whole_download_as_one_zip(self):
        inner = zipped({"rings.py": "i"})
        self.put("all.zip", zipped({"top/leeanna_1_2_rings.py": "x", "top/vandykbo_2_3_w.zip": inner}))
        found = self.handed("all.zip")
        self.assertEqual((found["s1"], found["s2"]), ({"rings.py": b"x"}, {"rings.py": b"i"}))

    def test_without_a_roster_each_name_is_a_student(self):
        self.put("in/anna/rings.py", "a")
        self.put("in/bo.zip", zipped({"rings.py": "b"}))
        self.assertEqual(sorted(self.handed(roster=False)), ["anna", "bo"])

    def test_a_name_that_could_be_two(self):
        self.put("roster.csv", "id,name\n1,Anna Lee\n2,Lee Anna\n")
        self.roster = read_roster(self.root / "roster.csv")
        self.put("in/leeanna_9_9_rings.py", "x")
        self.handed()
        self.assertEqual(self.of.unmatched, [("leeanna_9", "leeanna could be any of 1, 2")])

    def test_nothing_or_no_such_folder(self):
        (self.root / "in").mkdir()
        for name in ("in", "nowhere", "roster.csv"):
            with self.assertRaisesRegex(UserError, name):
                self.handed(name)


class TestWhatIsNoPython(Folder):
    """Whoever handed in something is not said to have handed in nothing."""

    def unread(self, student: str) -> list[str]:
        return self.of.only(student)[0].handed.unread

    def test_other_files_are_named_and_not_read(self):
        self.put("in/s1/rings.txt", "x")
        self.put("in/s1/notes/read me.md", b"\xff\xfe")
        self.put("in/s1/.DS_Store", "")
        self.put("in/s2.zip", zipped({"rings.ipynb": "x", "deep/rings.py": "z", "inner.zip": zipped({"a.py": ""})}))
        self.put("in/leeanna_1_2_x.pdf", "x")
        self.put("in/s4.rar", "x")
        found = self.handed()
        self.assertEqual((found["s1"], found["s2"]), ({}, {"deep/rings.py": b"z"}))
        self.assertEqual(self.unread("s2"), ["s2.zip/rings.ipynb", "s2.zip/inner.zip"])
        self.assertEqual(self.of.stray, ["s4.rar"])

    def test_one_file_alone(self):
        for student, name in (("s1", "in/s1/rings.txt"), ("s2", "in/vandykbo_1_2_x.pdf"), ("s3", "in/s3.zip")):
            self.put(name, zipped({"notes.doc": ""}) if name.endswith(".zip") else "x")
            self.assertEqual(self.handed()[student], {})
            self.assertEqual(len(self.unread(student)), 1)
        self.put("class.zip", zipped({"Anna Lee_991_assignsubmission_file_/rings.txt": "x"}))
        self.assertEqual(self.handed("class.zip")["s1"], {})

    def test_a_folder_or_zip_with_nothing_in_it_is_a_student(self):
        (self.root / "in/s1/empty").mkdir(parents=True)
        (self.root / "in/.hidden").mkdir()
        self.put("in/s2.zip", zipped({}))
        found = self.handed(roster=False)
        self.assertEqual(found, {"s1": {}, "s2": {}})
        with zipfile.ZipFile(self.root / "class.zip", "w") as archive:
            archive.writestr("s1/", "")
            archive.writestr("s2/rings.py", "x")
        self.assertEqual(self.handed("class.zip", roster=False), {"s1": {}, "s2": {"rings.py": b"x"}})

    def test_a_folder_in_the_place_of_a_file(self):
        (self.root / "in/s1/rings.py").mkdir(parents=True)
        self.assertEqual(self.handed()["s1"], {})
        problems = self.of.only("s1")[0].handed.problems
        self.assertEqual(problems, ["s1/rings.py: a folder, where a file is expected"])

    @unittest.skipUnless(os.name == "posix", "links")
    def test_a_link_to_a_folder(self):
        self.put("elsewhere/rings.py", "x")
        self.put("in/s1/notes.txt", "x")
        for name in ("in/s1/code", "in/s2"):
            os.symlink(self.root / "elsewhere", self.root / name)
        found = self.handed()
        self.assertEqual((found["s1"], found["s2"]), ({}, {}))
        for student, path in (("s1", "s1/code"), ("s2", "s2")):
            problems = self.of.only(student)[0].handed.problems
            self.assertEqual(problems, [f"{path}: a link, which is not followed"])

    @unittest.skipIf(os.name != "posix" or os.geteuid() == 0, "whoever may read everything")
    def test_a_folder_that_cannot_be_read(self):
        self.put("in/s1/code/rings.py", "x")
        (self.root / "in/s1/code").chmod(0)
        self.addCleanup((self.root / "in/s1/code").chmod, 0o700)
        self.handed()
        self.assertEqual(self.of.only("s1")[0].handed.problems, ["s1/code: Permission denied"])


class TestZips(Folder):
    def test_paths_that_lead_out_are_refused_and_nothing_is_written(self):
        names = ["../up.py", "/abs.py", "a/../../up.py", "C:\\x.py", "..\\up.py"]
        tree = read_zip(zipped({**dict.fromkeys(names, "x"), "ok.py": "1"}))
        self.assertEqual(list(tree.files), ["ok.py"])
        self.assertEqual(len(tree.problems), len(names))

    def test_links(self):
        info = zipfile.ZipInfo("link.py")
        info.external_attr = 0o120777 << 16
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(info, "/etc/passwd")
        self.assertEqual(read_zip(buffer.getvalue()).problems, [("link.py", "a link")])
        self.put("in/s1/real.py", "x")
        os.symlink("/etc/passwd", self.root / "in/s1/rings.py")
        self.assertEqual(self.handed()["s1"], {"real.py": b"x"})
        self.assertIn("rings.py: a link", self.of.only("s1")[0].handed.problems[0])

    def test_a_whole_class_has_more_files_than_one_student(self):
        many = dict.fromkeys(map("data/{}.txt".format, range(10_001)), "")
        self.put("in.zip", zipped({f"s1/{name}": "" for name in many} | {"s2/rings.py": "x"}))
        self.assertEqual(self.handed("in.zip")["s2"], {"rings.py": b"x"})
        self.put("in/s1/all.zip", zipped(many))
        self.handed()
        self.assertIn("more than 10,000 files", self.of.only("s1")[0].handed.problems[0])

    def test_bombs(self):
        tree = read_zip(zipped({"bomb.py": bytes(handin.FILE_BYTES + 1), "ok.py": "1"}))
        self.assertEqual((list(tree.files), tree.problems[0][0]), (["ok.py"], "bomb.py"))
        many = read_zip(zipped({f"{n}.py": "" for n in range(handin.MEMBERS + 1)}))
        self.assertFalse(many.files)
        self.assertIn("more than", many.problems[0][1])

    def test_a_broken_zip_is_its_students_problem(self):
        self.put("in/s1.zip", b"PK\3\4 no zip")
        self.put("in/s2/rings.py", "x")
        found = self.handed()
        self.assertEqual((found["s1"], found["s2"]), ({}, {"rings.py": b"x"}))
        self.assertIn("a zip that cannot be read", self.of.only("s1")[0].handed.problems[0])

    def test_a_folder_is_read_without_what_is_no_code(self):
        self.put("in/s1/.git/x.py", "")
        self.put("in/s1/__pycache__/y.py", "")
        self.put("in/s1/notes.txt", "")
        self.put("in/s1/rings.py", "")
        self.assertEqual(list(read_tree(self.root / "in").files), ["s1/rings.py"])


if __name__ == "__main__":
    unittest.main()
