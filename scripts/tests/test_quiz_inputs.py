"""What people hand to the commands: text, JSON, CSV, the class list."""

import csv
import io
import os
import random
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import csvfile
from faults import UserError
from inputs import check_writable, json_text, read_input, read_json, write_output
from roster import read_roster


class InFolder(unittest.TestCase):
    """A temporary folder at `self.folder`."""

    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)

    def put(self, name: str, data: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    def refused(self, message: str, function, *args):
        with self.assertRaisesRegex(UserError, message):
            function(*args)


class TestText(InFolder):
    def test_line_ends_and_mark_are_kept(self):
        self.assertEqual(read_input(self.put("a", b"\xef\xbb\xbfa\r\nb\rc\n")), "\ufeffa\r\nb\rc\n")

    def test_what_is_no_text(self):
        for data, message in [
            (b"", ":1: is empty"),
            (b"\xef\xbb\xbf \r\n", ":1: is empty"),
            ("a,b\nJos\u00e9,2\n".encode("latin-1"), ":2: byte 0xe9 is no UTF-8"),
            ("a,b\n".encode("utf-16"), ":1: is UTF-16"),
            (b"a\nb\0c", ":2: holds a NUL"),
        ]:
            self.refused(f"given.csv{message}", read_input, self.put("given.csv", data))
        self.refused("a folder", read_input, self.folder)
        self.refused("No such file", read_input, self.folder / "none.csv")
        self.refused("null", read_input, Path("a\0b"))

    def test_json(self):
        self.assertEqual(read_json(self.put("a", '\ufeff{"b":\r\n 1}')).line("b"), 2)
        for data, message in [
            ('{"a": 1,\n"b"}', ":2: no valid JSON"),
            ('{"a": 1,\n"a": 2}', ":2: no valid JSON: the key 'a' is there twice"),
            ("[" * 100_000, ":1: no"),
            ("9" * 5000, ":1: no JSON that can be read") if sys.version_info >= (3, 11) else ("{", ":1: no"),
        ]:
            self.refused(f"given.json{message}", read_json, self.put("given.json", data))

    def test_writing(self):
        path = self.folder / "out.json"
        write_output(path, "\u00e9\r\n")
        self.assertEqual(path.read_bytes(), b"\xc3\xa9\r\n")
        self.refused("out.json: exists already; --force", write_output, path, "x")
        self.assertEqual(path.read_bytes(), b"\xc3\xa9\r\n")
        write_output(path, b"x", True)
        self.assertEqual(path.read_bytes(), b"x")
        self.assertEqual(os.listdir(self.folder), ["out.json"])
        self.refused("a folder", check_writable, self.folder)
        self.refused("the folder .*none does not exist", check_writable, self.folder / "none" / "x")
        with self.assertRaises(ValueError):
            json_text({"a": float("nan")})

    @unittest.skipUnless(os.name == "posix", "permissions of POSIX")
    def test_what_is_written_has_usual_permissions(self):
        write_output(self.folder / "out", "x")
        self.assertEqual((self.folder / "out").stat().st_mode, self.put("usual", "x").stat().st_mode)


class TestCsv(InFolder):
    def table(self, data: str | bytes) -> csvfile.Table:
        return csvfile.read_table(self.put("t.csv", data))

    def test_parse_is_what_the_standard_module_does_and_loses_nothing(self):
        draw = random.Random(1)
        refused = 0
        for _ in range(5000):
            text = "".join(draw.choice('ab"",,;\n\r') for _ in range(draw.randint(1, 14)))
            try:
                wanted = [row or [""] for row in csv.reader(io.StringIO(text, newline=""), strict=True)]
            except csv.Error:
                refused += 1
                self.refused("f:[1-9]", csvfile.parse, text, ",", "f")
                continue
            records = csvfile.parse(text, ",", "f")
            self.assertEqual([record.values() for record in records], [[c.strip() for c in row] for row in wanted])
            self.assertEqual("".join(",".join(record.raw) + record.end for record in records), text)
        self.assertTrue(500 < refused < 4500)

    def test_delimiters_ends_and_mark(self):
        for delimiter in csvfile.DELIMITERS:
            for end in ("\n", "\r\n", "\r"):
                for mark in ("", "\ufeff"):
                    lines = [delimiter.join(row) for row in (["a", "b"], ['"x\n,;y"', " z "], ["1", ""])]
                    text = mark + end.join(lines)
                    table = self.table(text)
                    self.assertEqual((table.delimiter, table.columns), (delimiter, ["a", "b"]))
                    self.assertEqual([row.values() for row in table.rows], [["x\n,;y", "z"], ["1", ""]])
                    self.assertEqual([row.line for row in table.rows], [2, 4])
                    self.assertEqual(table.text(), text)

    def test_a_semicolon_file_with_commas_in_its_cells(self):
        table = self.table("id;What, why, how?\n1;a, b\n2;c\n")
        self.assertEqual(table.columns, ["id", "What, why, how?"])

    def test_faults_name_the_line(self):
        for text, message in [
            ("a,b\n1,2\n3\n", "t.csv:3: 1 cell, but the heading has 2"),
            ('a,b\n"x\ny",2\n3,4,5\n', "t.csv:4: 3 cells"),
            ('a,b\n1,"2\n', "t.csv:2: a quote"),
            ('a,b\n1,"2"x\n', "t.csv:2: a quote"),
            ("a,b,a\n1,2,3\n", "t.csv:1: two columns are called 'a'"),
            ("a,,c\n1,2,3\n", "t.csv:1: column 2 has no heading"),
        ]:
            self.refused(message, self.table, text)
        self.assertEqual(self.table("a,b,\n1,2,\n\n,,\n").columns, ["a", "b", ""])  # nothing stands there: fine
        self.assertEqual(len(list(self.table("a,b,\n1,2,\n\n,,\n").filled())), 1)

    def test_many_columns(self):
        heading = ",".join(f"c{number}" for number in range(20_000))
        self.assertEqual(len(self.table(heading + "\n").columns), 20_000)
        self.refused("t.csv:2: 1 cell, but", self.table, heading + "\n1\n")

    def test_written_cells_are_read_back(self):
        rows = [["a,b", 'say "x"', "line\nline", "", "=1+1"], ["1", "2", "3", "4", "5"]]
        text = csvfile.csv_text(["v", "w", "x", "y", "z"], rows)
        self.assertEqual([row.values() for row in self.table(text).rows], rows)
        self.assertEqual(list(csv.reader(io.StringIO(text)))[1:], rows)
        self.assertEqual(csvfile.formula_cells(["=1", "a", "", "-2", "@x"]), ["=1", "-2", "@x"])


CANVAS = """\ufeffStudent,ID,SIS User ID,SIS Login ID,Section,Quiz (12)
,,,,,Manual Posting
    Points Possible,,,,,18
"Lovelace, Ada",101,u1,ada,One,
"Hopper, Grace",102,u2,grace,One,
"Student, Test",999,,,One,
"""
MOODLE = "First name;Surname;ID number;Email address\nAda;Lovelace;;ada@x.org\nGrace;Hopper;;grace@x.org\n"


class TestRoster(InFolder):
    def roster(self, data: str | bytes):
        return read_roster(self.put("r.csv", data))

    def test_own_format_and_exports(self):
        for data, wanted in [
            ("id,name\ns1,Ada\n\ns2,Grace\n", [("s1", "Ada", ""), ("s2", "Grace", "")]),
            ("Email,ID,Group,Name\nA@x,s1,2,Ada\n", [("s1", "Ada", "A@x")]),
            (CANVAS, [("101", "Lovelace, Ada", ""), ("102", "Hopper, Grace", "")]),
            (MOODLE, [("ada@x.org", "Ada Lovelace", "ada@x.org"), ("grace@x.org", "Grace Hopper", "grace@x.org")]),
            ("First Name,Last Name,SID,Email\nAda,Lovelace,7,a@x\n", [("7", "Ada Lovelace", "a@x")]),
        ]:
            found = [(student.id, student.name, student.email) for student in self.roster(data).students]
            self.assertEqual(found, wanted)

    def test_faults_name_the_line(self):
        for data, message in [
            ("id,name\ns1,Ada\ns2,Grace\nS1,Alan\n", "r.csv:4: the id 'S1' is on line 2 already"),
            ("id,name,email\n1,Ada,a@x\n2,Grace,A@X\n", "r.csv:3: the email 'A@X' is on line 2"),
            ("id,name\n,Ada\n", "r.csv:2: the id is empty"),
            ("id,name\ns1,\n", "r.csv:2: the name is empty"),
            ("student,id\n,s1\n", "r.csv:2: the name is empty"),
            ("id,name\ns1,\u202eadA\n", "r.csv:2: the name .* cannot be printed"),
            ("name,group\nAda,1\n", "r.csv:1: no column holds an id"),
            ("student,group\nAda,1\n", "r.csv:1: no column holds an id"),
            ("id,group\ns1,1\n", "r.csv:1: no column holds the names"),
            ("id,name\n", "r.csv:1: no student follows"),
            ("", "r.csv:1: is empty"),
        ]:
            self.refused(message, self.roster, data)

    def test_find(self):
        roster = self.roster("id,name,email\ns1,Ada,a@x\ns2,Alan,b@x\ns3,Alan,c@x\n")
        self.assertEqual(roster.find(" S1 ").name, "Ada")
        self.assertEqual(roster.find("C@X").id, "s3")
        self.assertEqual(roster.find("ada").id, "s1")
        self.assertIsNone(roster.find("s4"))
        self.assertIsNone(roster.find(""))
        self.refused(r"'Alan' could be any of: s2 \(line 3\), s3 \(line 4\)", roster.find, "Alan")
