from fake_course import FakeCourse

from check_docs import SECTIONS
from lessons import parse_header
from mdtext import Document, slugify

DOCS = f"{FakeCourse.WHEELS}/docs/en.md"


class TestHead(FakeCourse):
    def test_the_head_is_read(self):
        header = parse_header(self.text(DOCS))
        self.assertEqual((header.title, header.hook, header.minutes), ("The Wheel", "A Wheel in one sitting.", 30))
        self.assertEqual(header.prerequisites, ([], ["Python basics"]))
        self.assertEqual(parse_header("**Prerequisites:** 76, lesson 7; a, b").prerequisites, (["76", "7"], ["a", "b"]))

    def test_first_line_is_the_title(self):
        self.docs("# The Wheel\n", "\n# The Wheel\n")
        self.assert_docs_fault(1, "the first line must be `# Title`")

    def test_a_quote_of_one_line_follows(self):
        line = self.docs("> A Wheel in one sitting.\n", "> A Wheel\n> in one sitting.\n")
        self.assert_docs_fault(line, "a quote of one line")
        self.docs("> A Wheel\n> in one sitting.\n", "A Wheel.\n")
        self.assert_docs_fault(line, "a quote of one line")

    def test_fields_are_there_in_order(self):
        line = self.docs("**Type:** Build\n**Languages:** Python\n", "**Languages:** Python\n**Type:** Build\n")
        self.assert_docs_fault(line + 1, "in the order Type, Languages")
        self.docs("**Type:** Build\n", "**Type:**\n")
        self.assert_docs_fault(line + 1, "the line `**Type:** ...` is missing or empty")

    def test_time_is_minutes(self):
        line = self.docs("~30 minutes", "half an hour")
        self.assert_docs_fault(line, "the time must read `~90 minutes`")

    def test_prerequisites_are_earlier_lessons(self):
        line = self.docs("**Prerequisites:** Python", "**Prerequisites:** 77; Python")
        self.assert_docs_fault(line, "no lesson '77'; the lessons are: 01, 02")
        self.docs("77; Python", "02; Python")
        self.assert_docs_fault(line, "02-carts does not come before this lesson")


class TestSections(FakeCourse):
    def test_each_section_is_needed(self):
        good = self.text(DOCS)
        for name in SECTIONS:
            with self.subTest(name):
                self.put(DOCS, good.replace(f"## {name}\n", f"### {name}\n"))
                self.assert_docs_fault(1, f"the section `## {name}` is missing")

    def test_order(self):
        text = self.text(DOCS)
        self.put(
            DOCS, text.replace("## Ship It", "## X").replace("## Use It", "## Ship It").replace("## X", "## Use It")
        )
        line = self.text(DOCS).splitlines().index("## Use It") + 1
        self.assert_docs_fault(line, "'Use It' must stand before 'Ship It'")

    def test_unknown_twice_and_empty(self):
        line = self.docs("## Ship It\n\nShip it.\n", "## Ship It\n\n## Going deeper\n\nx\n\n## Use It\n\nx\n")
        self.assert_docs_fault(line, "'Ship It' is empty")
        self.assert_docs_fault(line + 2, "unknown section 'Going deeper'; use `###`")
        self.assert_docs_fault(line + 6, "'Use It' is there twice")

    def test_a_second_title(self):
        line = self.docs("Ship it.", "# Ship it")
        self.assert_docs_fault(line, "a second `#` heading")

    def test_a_comment_in_a_block_is_no_heading(self):
        self.docs("python code/main.py\n", "# now run it\npython code/main.py\n")
        self.assert_good()


class TestLinks(FakeCourse):
    def test_each_kind_of_bad_link(self):
        for target, message in [
            ("../code/ring.py", "leads to nothing"),
            ("#the-solution", "there is no heading for #the-solution"),
            ("en.md#the-solution", "there is no heading for #the-solution"),
            ("../../02-carts/docs/en.md#nowhere", "there is no heading for #nowhere"),
            ("/README.md", "must be relative"),
            ("../../../../../outside.md", "leaves the repository"),
            ("../code/rings.py#L900", "no such line"),
            ("", "a link to nowhere"),
        ]:
            with self.subTest(target):
                self.put(DOCS, self.text(DOCS).replace("Ship it.", f"Ship [it]({target})."))
                line = self.text(DOCS).splitlines().index(f"Ship [it]({target}).") + 1
                self.assert_docs_fault(line, message)
                self.docs(f"Ship [it]({target}).", "Ship it.")

    def test_good_links(self):
        for target in (
            "en.md#key-terms",
            "../../02-carts/docs/en.md",
            "../code/rings.py#L2-L4",
            "https://example.org/x",
        ):
            with self.subTest(target):
                self.put(DOCS, self.text(DOCS).replace("Ship it.", f"Ship [it]({target} 'title')."))
                self.assert_good()
                self.docs(f"Ship [it]({target} 'title').", "Ship it.")

    def test_images_references_and_other_files(self):
        line = self.docs("Ship it.", "![a picture](../picture.png)\n\n[page]: ./missing.md")
        self.assert_docs_fault(line, "../picture.png leads to nothing")
        self.assert_docs_fault(line + 2, "./missing.md leads to nothing")
        self.put(".github/CONTRIBUTING.md", "Text\n\nSee [the course](../READ.md).\n")
        self.assert_fault(".github/CONTRIBUTING.md", 3, "leads to nothing")

    def test_links_in_code_do_not_count(self):
        self.docs("Ship it.", "`[x](missing.md)`\n\n```markdown\n[x](missing.md)\n```")
        self.assert_good()

    def test_blocks_name_their_language_and_end(self):
        line = self.docs("Ship it.", "```\nx\n```")
        self.assert_docs_fault(line, "must name its language")
        line = self.docs("- [A page]", "```text\n- [A page]")
        self.assert_docs_fault(line, "never closed")


class TestMap(FakeCourse):
    def test_q05_titles_and_times_in_the_readme_are_the_lessons(self):
        line = self.replace("README.md", "[The Wheel]", "[A Wheel]")
        self.assert_fault("README.md", line, "the row of 01-wheels does not say 'The Wheel'")
        line = self.replace("README.md", "45 min", "40 min")
        self.assert_fault("README.md", line, "the row of 02-carts does not say '45 min'")

    def test_a_lesson_that_the_map_forgot(self):
        self.replace("README.md", "phases/01-basics/02-carts", "phases/01-basics/01-wheels")
        self.assert_fault("README.md", 1, "one row that links to phases/01-basics/02-carts; it has 0")
        self.assert_fault("README.md", 6, "one row that links to phases/01-basics/01-wheels; it has 2")


class TestDocument(FakeCourse):
    def test_slugs_are_githubs(self):
        self.assertEqual(slugify("Use It: `torch.compile`, twice"), "use-it-torchcompile-twice")
        self.assertEqual(slugify("A [link](x.md) & more"), "a-link--more")
        self.assertEqual(Document("# A\n\n## A\n\n<a id='b'></a>").anchors, {"a", "a-1", "b"})

    def test_fences_within_fences_and_indented(self):
        document = Document("````text\n```python\n````\n1. x\n   ```bash\n   ls\n   ```\n<!-- ## no -->\n## B\n")
        self.assertEqual(
            [(b.language, b.line, b.lines) for b in document.blocks],
            [
                ("text", 1, ("```python",)),
                ("bash", 5, ("ls",)),
            ],
        )
        self.assertEqual([(h.text, h.line) for h in document.headings], [("B", 9)])

    def test_code_spans_over_lines_and_with_ticks(self):
        document = Document("a `b\nc` d ``e`f``\n\nlone ` tick\n\n`g`")
        self.assertEqual(document.code_spans, [(1, "b c"), (2, "e`f"), (6, "g")])
