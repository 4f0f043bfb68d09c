import json
import os
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from quiz_case import QuizCase, right_letters

from csvfile import read_table


class TestGradeQuiz(QuizCase):
    def put_class(self, folder: str = "in", seeds=("1#s1", "1#s2", None)) -> Path:
        """Three students: all right, two wrong, all blank."""
        for number, (seed, wrong) in enumerate(zip(seeds, (0, 2, None), strict=True), 1):
            answers = {} if wrong is None else self.letters(seed, wrong)
            self.file(f"{folder}/s{number}.json", self.sheet(f"s{number}", seed, **answers))
        return self.work / folder

    def test_table_json_and_csv(self):
        roster = self.file("r.csv", "id,name\ns1,Ada\ns2,Grace\ns3,Alan\ns4,Edsger\n")
        folder = self.put_class()
        out, err = self.course("grade-quiz", folder, "--roster", roster, "--out", self.work / "g")
        self.assertIn("s1       Ada    6/6       100.0      0\n", out)
        self.assertIn("s2       Grace  4/6        66.7      0\n", out)
        self.assertIn("s3       Alan   0/6         0.0      6\n", out)
        self.assertIn("No sheet of 1: s4", out)
        self.assertEqual(err, "")
        table = read_table(self.work / "g" / "01-grades.csv")
        rows = [dict(zip(table.columns, row.values(), strict=True)) for row in table.rows]
        self.assertEqual([row["points"] for row in rows], ["6", "4", "0", ""])
        self.assertEqual([row["status"] for row in rows], ["graded", "graded", "graded", "missing"])
        self.assertEqual({row["of"] for row in rows}, {"6"})
        first, *_ = read_table(self.work / "g" / "01-questions.csv").rows
        question = self.quiz.questions[0]
        wrong = (question.correct + 1) % 4
        self.assertEqual(first.values()[1:8], ["1", "w0", "pre", "3", "1", "0.3333", "1"])
        self.assertEqual(first.values()[9:], [str(wrong), "1", question.options[wrong]])
        value = json.loads((self.work / "g" / "01-quiz.json").read_text())
        printed, _ = self.course("grade-quiz", folder, "--roster", roster, "--json")
        self.assertEqual(json.loads(printed), [value])
        self.assertEqual(value["grades"][1]["answers"]["w0"], {"chosen": wrong, "right": False})
        self.assertEqual(value["missing"], [{"student": "s4", "name": "Edsger"}])
        self.refused("01-grades.csv: exists already; --force", "grade-quiz", folder, "--out", self.work / "g")

    def test_one_stage_alone(self):
        out, _ = self.course("grade-quiz", self.put_class(), "--stage", "pre", "--json")
        self.assertEqual(
            [(each["points"], each["percent"]) for each in json.loads(out)[0]["grades"]],
            [(1, 100.0), (0, 0.0), (0, 0.0)],
        )

    def test_several_lessons(self):
        carts = self.bank.quiz("2")
        self.file(
            "in/c.json",
            {
                "lesson": carts.lesson,
                "quiz": carts.sha256,
                "seed": "3",
                "student": "s1",
                "answers": right_letters(carts, "3", 1),
            },
        )
        found = json.loads(self.course("grade-quiz", self.put_class(), "--json")[0])
        self.assertEqual([(each["lesson"], len(each["grades"])) for each in found], [("01-wheels", 3), ("02-carts", 1)])
        self.assertEqual(found[1]["grades"][0]["points"], 5)
        self.refused("answers to 02-carts; 01-wheels is to be graded", "grade-quiz", self.work / "in", "--lesson", "1")

    def test_forms_are_blank_and_the_key_grades_to_all(self):
        roster = self.file("r.csv", "id,name\ns1,Ada\n../x,Grace\nS 3,Alan\n")
        self.course("quiz-forms", "1", "--roster", roster, "--out", self.work / "f", "--seed", "7")
        forms, instructor = self.work / "f" / "forms", self.work / "f" / "instructor"
        names = sorted(path.name for path in forms.iterdir())
        self.assertEqual(len(names), 6)
        self.assertTrue(all(name.startswith("01-") and "/" not in name for name in names))
        blank = json.loads(self.course("grade-quiz", forms, "--roster", roster, "--json")[0])[0]
        self.assertEqual([each["points"] for each in blank["grades"]], [0, 0, 0])
        key = read_table(instructor / "key.csv")
        answers = read_table(instructor / "answers.csv")
        self.assertEqual(key.columns[3:], [f"{n} {name}" for n, name in enumerate(answers.columns[5:], 1)])
        for path in forms.glob("*.json"):
            value = json.loads(path.read_text())
            text = path.with_suffix(".txt").read_text()
            row = next(row for row in key.rows if row.value(0) == value["student"])
            self.assertEqual((value["seed"], row.value(2)), (f"7#{value['student']}",) * 2)
            for column, name in enumerate(answers.columns[5:], 3):
                question = self.quiz.by_id[name]
                line = f"    [ ] {row.value(column)}  {question.options[question.correct]}\n"
                self.assertIn(line, text[text.index(question.text) :][:200])
                value["answers"][name] = row.value(column)
            path.write_text(json.dumps(value))
            for row in answers.rows:
                if row.value(0) == value["student"]:
                    row.raw[5:] = value["answers"].values()
        self.file("typed.csv", answers.text())
        for given in (forms, self.work / "typed.csv"):
            filled = json.loads(self.course("grade-quiz", given, "--roster", roster, "--json")[0])[0]
            self.assertEqual([each["points"] for each in filled["grades"]], [6, 6, 6])
        self.refused("key.csv:1: unknown column 'key for'", "grade-quiz", instructor / "key.csv", "--lesson", "1")
        self.refused("forms: exists already", "quiz-forms", "1", "--roster", roster, "--out", self.work / "f")

    def test_forms_are_the_same_each_time_and_differ_between_students(self):
        roster = self.file("r.csv", "id,name\n" + "".join(f"s{n},Student {n}\n" for n in range(20)))
        for folder in ("a", "b"):
            self.course("quiz-forms", "1", "--roster", roster, "--out", self.work / folder, "--json")
        one, two = (
            {path.name: path.read_bytes() for path in (self.work / folder / "forms").iterdir()} for folder in "ab"
        )
        self.assertEqual(one, two)
        orders = {tuple(question.order(f"0#s{n}")[0] for question in self.quiz.questions) for n in range(20)}
        self.assertGreater(len(orders), 15)

    def test_two_sheets_of_a_student(self):
        folder = self.put_class()
        other = self.file("in/again.json", self.sheet("S1", "4", **self.letters("4", 3)))
        message = f"two sheets of student 's1': {other}:1 and {folder / 's1.json'}:1"
        _, err = self.course("grade-quiz", folder, code=2)
        self.assertTrue(message in err.replace("'S1'", "'s1'"), err)
        for newer, points in ((other, 3), (folder / "s1.json", 6)):
            for path in (other, folder / "s1.json"):
                os.utime(path, (2000, 2000) if path == newer else (1000, 1000))
            found = json.loads(self.course("grade-quiz", folder, "--newest", "--json")[0])[0]
            self.assertEqual(found["grades"][0]["points"], points)
        os.utime(other, (2000, 2000))
        os.utime(folder / "s1.json", (2000, 2000))
        self.refused("are equally new", "grade-quiz", folder, "--newest")

    def test_the_time_in_the_sheets_counts_more_than_that_of_the_files(self):
        old = self.sheet("s1", "4", **self.letters("4")) | {"time": "2027-01-02T12:00:00+00:00"}
        new = self.sheet("s1", "4", **self.letters("4", 1)) | {"time": "2027-01-02T12:30:00+01:00"}  # 11:30 UTC
        os.utime(self.file("in/a.json", old), (1000, 1000))
        os.utime(self.file("in/b.json", new), (2000, 2000))
        found = json.loads(self.course("grade-quiz", self.work / "in", "--newest", "--json")[0])[0]
        self.assertEqual(found["grades"][0]["points"], 6)

    def test_a_sheet_without_a_student_goes_by_its_file(self):
        self.file("in/ada.json", self.sheet(None, None, **self.letters(None)))
        found = json.loads(self.course("grade-quiz", self.work / "in", "--json")[0])[0]
        self.assertEqual(found["grades"][0]["student"], "ada")

    def test_who_is_not_in_the_roster(self):
        roster = self.file("r.csv", "id,name\ns1,Ada\ns2,Alan\ns3,Alan\n")
        self.put_class()
        path = self.file("in/s9.json", self.sheet("s9"))
        grade = ("grade-quiz", self.work / "in", "--roster", roster)
        line = path.read_text().splitlines().index(' "student": "s9"') + 1
        self.assertGreater(line, 1)
        self.refused(f"{path}:{line}: the student 's9' is not in {roster}", *grade)
        self.file("in/s9.json", self.sheet("Alan"))
        self.refused(f"{path}:{line}: {roster}: 'Alan' could be any of: s2 (line 3), s3 (line 4)", *grade)
        self.file("in/s9.json", self.sheet())
        whose = "it does not say whose it is, and by its own name the student 's9' is not in"
        self.refused(f"{path}:1: {whose} {roster}", *grade)
        other = self.file("in/t9.json", self.sheet("t9"))
        _, told = self.course(*grade, code=2)
        self.assertEqual([line.split(":")[0] for line in told.splitlines()], ["course", str(other)])  # both in one go
        path.unlink()
        other.unlink()
        columns, row = ",".join(self.quiz.numbers), ",".join("A" * len(self.quiz.questions))
        table = self.file("rows.csv", f"student,lesson,{columns}\ns1,1,{row}\n\ns8,1,{row}\n")
        self.refused(f"{table}:4: the student 's8' is not in {roster}", "grade-quiz", table, "--roster", roster)

    @unittest.skipUnless(os.name == "posix", "links")
    def test_a_link_to_nothing_is_a_fault(self):
        self.put_class()
        os.symlink(self.root / "nowhere", self.work / "in" / "s9.json")
        self.refused("s9.json: No such file or directory", "grade-quiz", self.work / "in")

    def test_every_file_with_a_fault_is_named(self):
        first, second = self.quiz.questions[0].id, self.quiz.questions[1].id
        self.file("in/a.json", self.sheet("s1", **{first: "E"}))
        self.file("in/b.json", self.sheet("s2", **{first: "A"}))
        self.file("in/c.json", self.sheet("s3", **{first: "A", second: "Z"}))
        _, err = self.course("grade-quiz", self.work / "in", code=2)
        lines = err.splitlines()
        self.assertEqual(len(lines), 2)
        self.assertIn(f"a.json:6: 'E' is no option of {first!r}", lines[0])
        self.assertIn(f"c.json:7: 'Z' is no option of {second!r}", lines[1])

    def test_what_stands_for_the_id_is_said(self):
        self.file("in/a.json", self.sheet("s1@x.org", **self.letters(None)))
        roster = self.file("r.csv", "kid,name,email\n1,Ada,s1@x.org\n")
        for args in (("grade-quiz", self.work / "in"), ("quiz-forms", "1", "--out", self.work / "f")):
            _, err = self.course(*args, "--roster", roster)
            self.assertEqual(err, f"course: {roster}: no column holds an id: that of 'email' is taken\n")

    def test_files_that_are_none(self):
        empty = self.work / "empty"
        empty.mkdir()
        self.refused("no answer sheet was found", "grade-quiz", empty)
        self.refused("none.json: No such file", "grade-quiz", self.work / "none.json")
        self.refused("neither a folder nor", "grade-quiz", self.file("a.txt", "x"))
        folder = self.put_class()
        self.file("in/notes.txt", "x")
        self.file("in/__MACOSX/._s1.json", b"\0\5")
        _, err = self.course("grade-quiz", folder, folder, folder / "s1.json")  # given twice is no second sheet
        self.assertIn("2 left aside, as no .json: ", err)
        self.assertNotIn("class's .csv", err)
        self.file("in/answers.csv", "x")
        self.assertIn("(a class's .csv is read where it is named itself)", self.course("grade-quiz", folder)[1])
        self.file("in/sub/broken.json", "{")
        self.refused("broken.json:1: no valid JSON", "grade-quiz", folder)

    def test_a_corrected_key_grades_the_same_sheets(self):
        folder = self.put_class()
        before = self.quiz.by_id["w1"].correct
        self.replace(f"{self.WHEELS}/quiz.json", f'"correct": {before},', f'"correct": {before - 1},')
        found = json.loads(self.course("grade-quiz", folder, "--json")[0])[0]
        self.assertEqual(found["grades"][0]["points"], 5)
