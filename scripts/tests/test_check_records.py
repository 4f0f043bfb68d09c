"""Numbers of GPU runs stand in the record that the text links."""

import unittest

from fake_course import FakeCourse

DOCS = f"{FakeCourse.WHEELS}/docs/en.md"
RECORD = """# card: 2 x NVIDIA H200
# torch: 2.11.0+cu130
# date: 2026-11-28
# command: python code/main.py --bench --size 774M --batch 16

size 774M, batch 16: ours 239.5 ms, ratio 1.01 (1.00 to 1.01), peak 33,928 MiB, 11 pairs, 4 ranks
"""
TEXT = "(2 x NVIDIA H200, torch 2.11.0+cu130, 2026-11-28; 11 pairs. [record](gpu_runs/spin.txt))"
TABLE = "| size | ours, ms | ratio | peak MiB |\n|---|---|---|---|\n| 774M, 16 | 239.5 | 1.01 (1.00 to 1.01) | 33928 |"


class TestRecords(FakeCourse):
    def texts(self, text: str = TEXT, table: str = TABLE, record: str | None = RECORD) -> int:
        """Put a table and a paragraph into the docs, and the record beside; the line of the paragraph."""
        if record is not None:
            self.put(f"{self.WHEELS}/docs/gpu_runs/spin.txt", record)
        self.replace(DOCS, "## Ship It", f"{table}\n\n{text}\n\n## Ship It")
        return self.text(DOCS).splitlines().index(text.splitlines()[0]) + 1

    def test_all_numbers_in_the_record(self):
        self.texts()
        self.assert_good()

    def test_zeros_at_the_end_of_a_fraction_are_no_difference(self):
        self.texts(record=RECORD.replace("239.5 ms", "239.5000 ms"), table=TABLE.replace("1.01 (1.00", "1.010 (1.0"))
        self.assert_good()

    def test_a_number_in_the_table_that_the_run_did_not_print(self):
        line = self.texts(table=TABLE.replace("239.5", "229.5"))
        self.assert_docs_fault(line - 4, "229.5 is not in gpu_runs/spin.txt")

    def test_a_number_in_the_paragraph(self):
        line = self.texts(text=TEXT.replace("11 pairs", "13 pairs"))
        self.assert_docs_fault(line, "13 is not in gpu_runs/spin.txt")

    def test_an_interval_that_is_another_rows(self):
        record = RECORD.replace("1.01 (1.00 to 1.01)", "1.01 (1.00 to 1.01), tuned 0.96 0.92 to 1.02")
        self.texts(record=record, table=TABLE.replace("1.01 (1.00 to 1.01)", "0.96 (0.92 to 1.02)"))
        self.assert_good()
        self.setUp()
        line = self.texts(record=record, table=TABLE.replace("1.01 (1.00 to 1.01)", "0.96 (1.00 to 1.01)"))
        self.assert_docs_fault(line - 4, "no line of gpu_runs/spin.txt has 0.96 (1.00 to 1.01)")

    def test_more_cards_than_there_were(self):
        line = self.texts(text=TEXT.replace("2 x", "12 x"), record=RECORD + "12 cards\n")
        self.assert_docs_fault(line, "gpu_runs/spin.txt says card 2 x NVIDIA H200; this does not")

    def test_no_link(self):
        line = self.texts(text="On two H200 it took 239.5 ms.", record=None)
        self.assert_docs_fault(line, "numbers of a GPU run link their record")

    def test_no_record(self):
        line = self.texts(record=None)
        self.assert_docs_fault(line, "there is no gpu_runs/spin.txt")

    def test_another_card_date_or_torch(self):
        for name, value in (("card", "8 x NVIDIA H100"), ("date", "2026-01-02"), ("torch", "2.13.0")):
            with self.subTest(name):
                lines = [f"# {name}: {value}" if line.startswith(f"# {name}") else line for line in RECORD.splitlines()]
                self.setUp()
                line = self.texts(record="\n".join(lines))
                self.assert_docs_fault(line, f"gpu_runs/spin.txt says {name} {value}; this does not")

    def test_a_record_without_its_command(self):
        line = self.texts(record=RECORD.replace("# command", "# other"))
        self.assert_docs_fault(line, "gpu_runs/spin.txt has no line `# command: ...`")

    def test_a_record_that_no_text_links(self):
        self.put(f"{self.WHEELS}/docs/gpu_runs/old.txt", RECORD)
        self.assert_fault(f"{self.WHEELS}/docs/gpu_runs/old.txt", 1, "no text links this record")


if __name__ == "__main__":
    unittest.main()
