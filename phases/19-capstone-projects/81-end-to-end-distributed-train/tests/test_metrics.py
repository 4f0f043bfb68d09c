import json
import math
import struct
import sys
import tempfile
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import tensorboard_file
from metrics import MetricsFile, from_line, read_metrics, to_line
from tensorboard_file import EventFile, crc32c, masked


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.path = self.folder / "metrics.jsonl"


def row(step: int, **more) -> dict:
    return {"step": step, "loss": 4.0 - step / 10, "norm": 1 / (step + 2)} | more


class TestLine(unittest.TestCase):
    def test_numbers_come_back_exactly(self):
        values = {"loss": 0.1 + 0.2, "norm": 5e-324, "bytes": 2**53 + 1, "text": 'a "quoted" line\n', "none": None}
        line = to_line({"step": 3} | values)
        self.assertEqual(line.count("\n"), 1)
        self.assertEqual(from_line(line, "here"), {"step": 3} | values)

    def test_what_is_not_finite_is_null_and_named(self):
        line = to_line({"step": 3, "loss": math.nan, "norm": -math.inf, "lr": math.inf, "seconds": 1.5})
        strict = json.loads(line, parse_constant=self.fail)
        self.assertEqual([strict[name] for name in ("loss", "norm", "lr")], [None] * 3)
        self.assertEqual(strict["not_finite"], {"loss": "nan", "norm": "-inf", "lr": "inf"})
        again = from_line(line, "here")
        self.assertTrue(math.isnan(again["loss"]))
        self.assertEqual((again["norm"], again["lr"], again["seconds"]), (-math.inf, math.inf, 1.5))
        self.assertNotIn("not_finite", again)

    def test_a_row_that_is_none(self):
        for value in (object(), {1, 2}, [math.nan], {"loss": math.inf}):
            with self.assertRaises(ValueError):
                to_line({"step": 1, "value": value})

    def test_a_line_that_is_none(self):
        for line in ("", "[]", "3", "{", '{"loss": 3}', '{"step": NaN}', '{"step": 1, "not_finite": {"loss": "much"}}'):
            with self.assertRaisesRegex(ValueError, r"^m:7\b"):
                from_line(line, "m:7")
        for step in ("0", "-1", "1.0", "true", '"1"', "null"):
            with self.assertRaisesRegex(ValueError, r"^m:7\b"):
                from_line(f'{{"step": {step}}}', "m:7")


class TestMetricsFile(Folder):
    def steps(self) -> list[int]:
        return [each["step"] for each in read_metrics(self.path)]

    def test_a_line_is_in_the_file_when_write_returns(self):
        with MetricsFile(self.path, 0) as metrics:
            for step in (1, 2, 3):
                metrics.write(row(step))
                self.assertEqual(read_metrics(self.path), [row(each) for each in range(1, step + 1)])

    def test_folders_are_made(self):
        with MetricsFile(self.folder / "a" / "b" / "m.jsonl", 0) as metrics:
            metrics.write(row(1))
        self.assertEqual(read_metrics(self.folder / "a" / "b" / "m.jsonl"), [row(1)])

    def test_a_resume_drops_the_steps_that_come_again(self):
        with MetricsFile(self.path, 0) as metrics:
            for step in range(1, 8):
                metrics.write(row(step))
        with MetricsFile(self.path, 4) as metrics:
            self.assertEqual(self.steps(), [1, 2, 3, 4])
            metrics.write(row(5, again=True))
        self.assertEqual(read_metrics(self.path), [*map(row, range(1, 5)), row(5, again=True)])

    def test_a_rollback_does_too_while_the_file_is_open(self):
        with MetricsFile(self.path, 0) as metrics:
            for step in range(1, 8):
                metrics.write(row(step))
            metrics.rewind(5)
            metrics.write(row(6))
            metrics.rewind(0)
            self.assertEqual(self.steps(), [])
            metrics.write(row(1))
        self.assertEqual(self.steps(), [1])

    def test_skipped_steps_are_not_there(self):
        with MetricsFile(self.path, 0) as metrics:
            for step in (1, 2, 6, 7):
                metrics.write(row(step))
            metrics.rewind(4)
        self.assertEqual(self.steps(), [1, 2])

    def test_half_a_line_of_a_killed_process(self):
        whole = "".join(to_line(row(step)) for step in (1, 2))
        third = to_line(row(3))
        for cut in range(len(third)):  # the last one: all but the newline
            self.path.write_text(whole + third[:cut])
            self.assertEqual(self.steps(), [1, 2], cut)
            with MetricsFile(self.path, 9) as metrics:
                metrics.write(row(3))
            self.assertEqual(read_metrics(self.path), [row(1), row(2), row(3)])

    def test_no_step_twice(self):
        with MetricsFile(self.path, 0) as metrics:
            metrics.write(row(4))
            for step in (4, 3):
                with self.assertRaisesRegex(ValueError, f"step {step} after step 4: rewind first"):
                    metrics.write(row(step))
        with MetricsFile(self.path, 4) as metrics, self.assertRaisesRegex(ValueError, "step 4 after step 4"):
            metrics.write(row(4))

    def test_a_file_of_something_else_is_left_alone(self):
        for text, fault in [
            ("a diary\n", r":1\b"),
            ("a diary", r":1\b"),
            (to_line(row(1)) + "oops\n" + to_line(row(2)), r":2\b"),
            (to_line(row(1)) + "{half\n" + to_line(row(2)), r":2\b"),
            (to_line(row(2)) + to_line(row(2)), ":2: step 2 comes after step 2"),
            (to_line(row(2)) + to_line(row(1)), ":2: step 1 comes after step 2"),
        ]:
            self.path.write_text(text)
            with self.subTest(fault):
                with self.assertRaisesRegex(ValueError, f"metrics.jsonl{fault}"):
                    MetricsFile(self.path, position=9)
                self.assertEqual(self.path.read_text(), text)


def decode(data: bytes) -> list[tuple[int, int, bytes | int | float]]:
    """Take a protocol buffer message apart, strictly: [(field number, wire type, value)]."""
    fields, at = [], 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            value = varint()
        else:
            size = {1: 8, 2: None, 5: 4}[kind]
            size = varint() if size is None else size
            value, at = data[at : at + size], at + size
            if len(value) != size:
                raise ValueError("cut off")
            value = value if kind == 2 else struct.unpack("<d" if kind == 1 else "<f", value)[0]
        fields.append((number, kind, value))
    return fields


def records(data: bytes) -> list[bytes]:
    """Take a TFRecord file apart; both checksums of each record must be right."""
    found = []
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + size]
        for part, at in ((data[:8], 8), (body, 12 + size)):
            if struct.unpack("<I", data[at : at + 4])[0] != masked(crc32c(part)):
                raise ValueError("checksum")
        found.append(body)
        data = data[16 + size :]
    return found


def scalars(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Return (step, {tag: value}) of each event with a summary."""
    found = []
    for data in records(path.read_bytes()):
        fields = {number: value for number, _, value in decode(data)}
        if 5 in fields:
            values = [{n: v for n, _, v in decode(value)} for _, _, value in decode(fields[5])]
            found.append((fields[2], {value[1].decode(): value[2] for value in values}))
    return found


class TestChecksum(unittest.TestCase):
    def test_known_values(self):
        """Of RFC 3720, appendix B.4, and the usual check value."""
        self.assertEqual(crc32c(b"123456789"), 0xE3069283)
        self.assertEqual(crc32c(b""), 0)
        self.assertEqual(crc32c(bytes(32)), 0x8A9136AA)
        self.assertEqual(crc32c(b"\xff" * 32), 0x62A8AB43)
        self.assertEqual(crc32c(bytes(range(32))), 0x46DD794E)
        self.assertEqual(crc32c(bytes(range(31, -1, -1))), 0x113FDB5C)

    def test_the_mask(self):
        self.assertEqual(masked(0), 0xA282EAD8)
        self.assertEqual(masked(0xE3069283), (((0xE3069283 >> 15) | (0xE3069283 << 17)) + 0xA282EAD8) % 2**32)
        self.assertLess(masked(0xFFFFFFFF), 2**32)

    def test_varint(self):
        known = {0: "00", 1: "01", 127: "7f", 128: "8001", 300: "ac02", 2**32: "8080808010"}
        self.assertEqual({value: tensorboard_file.varint(value).hex() for value in known}, known)


class TestEventFile(Folder):
    def write(self) -> Path:
        times = iter(range(1_700_000_000, 1_800_000_000))
        with EventFile(self.folder, 0, clock=lambda: next(times)) as events:
            for step in (1, 2, 300):
                events.write(row(step, seconds=0.25, text="no number", none=None, flag=True))
            events.rewind(2)
            events.write(row(3))
            events.write({"step": 4, "loss": math.nan, "norm": 1e300})
        return events.path

    def test_a_strict_reader_finds_the_numbers(self):
        found = scalars(self.write())
        self.assertEqual([step for step, _ in found], [1, 2, 300, 3, 4])
        self.assertEqual(found[0][1].keys(), {"loss", "norm", "seconds"})
        for step, values in found[:4]:
            self.assertAlmostEqual(values["loss"], row(step)["loss"], delta=2**-22)
            self.assertAlmostEqual(values["norm"], row(step)["norm"], delta=2**-24)
        self.assertTrue(math.isnan(found[4][1]["loss"]))
        self.assertEqual(found[4][1]["norm"], math.inf)

    def test_the_first_event_names_the_format_and_the_second_begins_a_session(self):
        first, second = map(decode, records(self.write().read_bytes())[:2])
        self.assertEqual(first, [(1, 1, 1_700_000_001.0), (3, 2, b"brain.Event:2")])
        self.assertEqual(second[1:], [(2, 0, 1), (7, 2, b"\x08\x01")])

    def test_each_event_is_in_the_file_when_write_returns(self):
        with EventFile(self.folder, 0) as events:
            events.write(row(1))
            self.assertEqual([step for step, _ in scalars(events.path)], [1])

    def test_a_flipped_bit_is_noticed(self):
        data = self.write().read_bytes()
        for at in (0, 9, 20, len(data) - 1):
            broken = bytearray(data)
            broken[at] ^= 4
            with self.assertRaises((ValueError, struct.error)):
                records(bytes(broken))

    def test_two_files_in_one_second_have_two_names(self):
        with EventFile(self.folder, 0, clock=lambda: 5.0) as one, EventFile(self.folder, 0, clock=lambda: 5.0) as two:
            self.assertNotEqual(one.path, two.path)

    def test_tensorboard_reads_them(self):
        try:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        except ImportError:
            self.skipTest("tensorboard is not installed")
        with EventFile(self.folder, 0, clock=lambda: 5.0) as events:
            for step in range(1, 8):
                events.write(row(step))
            events.rewind(5)  # a rollback: 6 and 7 come again
            events.write(row(6, loss=9.0))
        with EventFile(self.folder, 6, clock=lambda: 6.0) as events:  # a resume, in a new file
            events.write(row(7, loss=8.0))
        reader = EventAccumulator(str(self.folder))
        reader.Reload()
        self.assertEqual(reader.Tags()["scalars"], ["loss", "norm"])
        found = [(each.step, each.value) for each in reader.Scalars("loss")]
        expected = [*((step, 4.0 - step / 10) for step in range(1, 6)), (6, 9.0), (7, 8.0)]
        self.assertEqual([step for step, _ in found], [step for step, _ in expected])
        for (step, value), (_, loss) in zip(found, expected, strict=True):
            self.assertAlmostEqual(value, loss, delta=2**-21, msg=step)


if __name__ == "__main__":
    unittest.main()
