import itertools
import math
import sys
import tempfile
import unittest
from collections import Counter
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from corpus import SUCCESSORS, Batches, Corpus, Language, from_text, make_corpus, synthetic


class TestMakeCorpus(unittest.TestCase):
    def test_the_same_on_every_machine(self):
        self.assertEqual(make_corpus(7, 12).tolist(), [41, 55, 57, 9, 38, 44, 44, 19, 35, 28, 3, 11])
        self.assertEqual(make_corpus(7, 12).dtype, torch.int64)

    def test_a_longer_one_begins_with_the_shorter(self):
        self.assertTrue(torch.equal(make_corpus(7, 1000)[:100], make_corpus(7, 100)))

    def test_another_seed_is_another_language(self):
        self.assertNotEqual(Language(1).successors(), Language(2).successors())
        self.assertFalse(torch.equal(make_corpus(1, 100), make_corpus(2, 100)))

    def test_it_can_be_learned_successors_come_as_often_as_it_says(self):
        text, rows = make_corpus(7, 40_000).tolist(), Language(7).successors()
        self.assertTrue(all(len(set(row)) == len(SUCCESSORS) and set(row) <= set(range(64)) for row in rows))
        levels = Counter(rows[a].index(b) for a, b in itertools.pairwise(text))  # raises for any other token
        for level, p in enumerate(SUCCESSORS):
            four_sigma = 4 * math.sqrt(p * (1 - p) / 39_999)
            self.assertAlmostEqual(levels[level] / 39_999, p, delta=four_sigma)

    def test_the_floor_is_the_loss_of_one_who_knows_the_language(self):
        text, rows = make_corpus(7, 40_000).tolist(), Language(7).successors()
        losses = [-math.log(SUCCESSORS[rows[a].index(b)]) for a, b in itertools.pairwise(text)]
        self.assertAlmostEqual(sum(losses) / len(losses), Language.entropy_floor(), delta=0.02)

    def test_lengths_that_are_none(self):
        for wrong in (0, -1, 2.5, True, "9", None):
            with self.assertRaisesRegex(ValueError, "total_tokens"):
                make_corpus(7, wrong)

    def test_the_last_tenth_is_held_out(self):
        corpus = synthetic(7, 1000)
        self.assertEqual((len(corpus.train), len(corpus.held_out), corpus.vocab), (900, 100, 64))
        self.assertTrue(torch.equal(torch.cat([corpus.train, corpus.held_out]), make_corpus(7, 1000)))


class TestFingerprint(unittest.TestCase):
    def test_it_changes_with_any_token(self):
        tokens = torch.arange(40)
        before = Corpus.split(tokens, 64, 1.0, "x").fingerprint()
        self.assertEqual(Corpus.split(tokens.clone(), 64, 1.0, "x").fingerprint(), before)
        for place in (0, 35, 36, 39):
            changed = tokens.clone()
            changed[place] += 1
            self.assertNotEqual(Corpus.split(changed, 64, 1.0, "x").fingerprint(), before)


class TestText(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "text.txt"

    def read(self, data: bytes, seq: int = 4) -> Corpus:
        self.path.write_bytes(data)
        return from_text(self.path, seq)

    def test_vocabulary_tokens_and_held_out_tenth(self):
        text = "the cat sat on the mat, the hat sat on the cat. " * 2
        corpus = self.read(text.encode())
        letters = sorted(set(text))
        self.assertEqual(corpus.vocab, len(letters))
        self.assertEqual("".join(letters[i] for i in torch.cat([corpus.train, corpus.held_out]).tolist()), text)
        self.assertEqual((len(corpus.train), len(corpus.held_out)), (86, 10))

    def test_the_yardstick_is_the_entropy_of_single_characters(self):
        self.assertAlmostEqual(self.read(b"ab" * 100).yardstick, math.log(2))
        self.assertAlmostEqual(self.read(b"aaab" * 100).yardstick, 0.75 * math.log(4 / 3) + 0.25 * math.log(4))

    def test_line_endings_and_a_byte_order_mark_are_not_letters(self):
        plain = self.read("zwei Zeilen\nüber Öl\n".encode() * 9)
        windows = self.read(b"\xef\xbb\xbf" + "zwei Zeilen\r\nüber Öl\r\n".encode() * 9)
        self.assertEqual((plain.vocab, plain.fingerprint()), (windows.vocab, windows.fingerprint()))

    def test_what_is_no_text(self):
        with self.assertRaisesRegex(ValueError, r"nothing\.txt: cannot be read.*No such file"):
            from_text(self.path.with_name("nothing.txt"), 4)
        with self.assertRaisesRegex(ValueError, "cannot be read as UTF-8"):
            from_text(self.path.parent, 4)  # a folder
        for data in (b"\x80\x81" * 200, "ä".encode("latin-1") * 200, "text".encode("utf-16") * 50):
            with self.assertRaisesRegex(ValueError, r"text\.txt: cannot be read as UTF-8"):
                self.read(data)

    def test_too_short(self):
        for data, count in ((b"", 0), (b"a", 1), (b"ab" * 20, 40)):  # 40: four held out, one of them is no input
            with self.assertRaisesRegex(ValueError, f"{count} characters, . of them distinct: too few"):
                self.read(data)
        self.assertEqual(len(self.read(b"ab" * 25).held_out), 5)
        with self.assertRaisesRegex(ValueError, "200 characters, 1 of them distinct: too few"):
            self.read(b"a" * 200)


class TestBatches(unittest.TestCase):
    def setUp(self):
        self.batches = Batches(torch.arange(101), rows=4, seq=5, seed=3)  # 20 windows: 5 batches are an epoch
        self.odd = Batches(torch.arange(101), rows=7, seq=5, seed=3)  # no whole number of batches is

    def stream(self, batches: Batches, steps: int) -> list[int]:
        """The windows that so many steps visit, each by its first token."""
        return [row[0].item() for step in range(steps) for row in batches.batch(step)]

    def epoch(self, number: int, batches: Batches | None = None) -> list[int]:
        return self.stream(batches or self.batches, 5 * (number + 1))[20 * number :]

    def test_a_window_is_consecutive_tokens_and_the_target_of_the_last(self):
        batch = self.batches.batch(0)
        self.assertEqual(batch.shape, (4, 6))
        for row in batch.tolist():
            self.assertEqual(row, list(range(row[0], row[0] + 6)))
            self.assertEqual(row[0] % 5, 0)

    def test_an_epoch_visits_every_window_once(self):
        for number in range(3):
            self.assertEqual(sorted(self.epoch(number)), list(range(0, 100, 5)))

    def test_no_two_ranks_or_steps_of_an_epoch_share_a_window(self):
        parts = [part for step in range(5) for part in self.batches.batch(step).chunk(2)]  # of two ranks
        firsts = [set(part[:, 0].tolist()) for part in parts]
        self.assertEqual(sum(map(len, firsts)), len(set.union(*firsts)))

    def test_a_batch_goes_on_with_the_next_epoch(self):
        """The third of 7, 7, 7: six samples end the first epoch, and one begins the second."""
        self.assertEqual([len(self.odd.batch(step)) for step in range(20)], [7] * 20)
        self.assertEqual(self.odd.batch(2)[:6, 0].tolist(), self.epoch(0)[14:])
        self.assertEqual(self.odd.batch(2)[6:, 0].tolist(), self.epoch(1)[:1])

    def test_the_stream_is_the_same_whatever_the_rows(self):
        expected = self.stream(self.batches, 35)
        for rows in (1, 3, 7, 20):
            batches = Batches(torch.arange(101), rows, seq=5, seed=3)
            self.assertEqual(self.stream(batches, 140 // rows), expected[: 140 // rows * rows], rows)

    def test_five_samples_two_ranks_two_epochs(self):
        batches = Batches(torch.arange(6), rows=2, seq=1, seed=3)
        found = self.stream(batches, 5)
        self.assertEqual((batches.per_epoch, set(found[:5]), set(found[5:])), (5, set(range(5)), set(range(5))))
        self.assertNotEqual(found[:5], found[5:])

    def test_a_position_says_what_was_drawn_and_of_which_stream(self):
        found = self.odd.position(21)
        expected = {"samples": 21, "epoch": 1, "place": 1, "seed": 3, "windows": 20}
        self.assertEqual({key: found[key] for key in expected}, expected)
        self.assertEqual(self.odd.drawn_at(found), 21)
        self.assertEqual(self.batches.drawn_at(found), 21, "another number of rows is the same stream")
        self.assertEqual(self.batches.take(21)[:, 0].tolist(), self.epoch(1)[1:5])

    def test_a_position_in_another_stream_is_refused(self):
        position = self.batches.position(21)
        for other, message in [
            (Batches(torch.arange(101), rows=4, seq=5, seed=4), "seed was 3, is 4"),
            (Batches(torch.arange(101), rows=4, seq=4, seed=3), "place was 1, is 21; windows was 20, is 25"),
            (Batches(torch.arange(101) + 1, rows=4, seq=5, seed=3), "tokens was"),
        ]:
            with self.assertRaisesRegex(ValueError, f"the data's position: .*{message}"):
                other.drawn_at(position)
        for wrong, message in [
            ({"place": 2}, "place was 2, is 1"),
            ({"epoch": 0}, "epoch was 0, is 1"),
            ({"samples": -1}, "samples must be"),
            ({"samples": True}, "samples must be"),
        ]:
            with self.assertRaisesRegex(ValueError, message):
                self.batches.drawn_at(position | wrong)

    def test_each_epoch_has_an_order_of_its_own(self):
        orders = [tuple(self.epoch(number)) for number in range(5)]
        self.assertEqual(len(set(orders)), 5)

    def test_it_is_a_function_of_seed_and_step(self):
        again = Batches(torch.arange(101), rows=4, seq=5, seed=3)
        for step in (12, 0, 7, 6, 0, 99):  # any order, mid-epoch too: nothing depends on what was read before
            self.assertTrue(torch.equal(again.batch(step), self.batches.batch(step)))
        other = Batches(torch.arange(101), rows=4, seq=5, seed=4)
        self.assertNotEqual(self.epoch(0, other), self.epoch(0))

    def test_the_next_seed_is_not_the_next_epoch(self):
        other = Batches(torch.arange(101), rows=4, seq=5, seed=4)
        self.assertNotEqual(self.epoch(0, other), self.epoch(1))

    def test_it_draws_nothing_from_the_global_generator(self):
        before = torch.get_rng_state()
        self.batches.batch(8)
        self.assertTrue(torch.equal(torch.get_rng_state(), before))

    def test_too_few_windows(self):
        Batches(torch.arange(21), rows=4, seq=5, seed=0)
        for length, windows in ((20, 3), (1, 0), (0, 0)):
            with self.assertRaisesRegex(ValueError, f"{length} tokens hold {windows} windows of 5: a batch needs 4"):
                Batches(torch.arange(length), rows=4, seq=5, seed=0)
        for wrong in ({"rows": 0, "seq": 5}, {"rows": 4, "seq": 0}):
            with self.assertRaisesRegex(ValueError, "whole number of at least 1"):
                Batches(torch.arange(50), seed=0, **wrong)


if __name__ == "__main__":
    unittest.main()
