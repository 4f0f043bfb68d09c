import sys
import unittest
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[3].glob("*/*/code"))  # every lesson's code

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from zero_cases import Odd, copy_of, optimizer_for, put_gradients, virtual


class TestHooks(unittest.TestCase):
    """torch's own optimizers call them like this; see `test_torch_does_the_same`."""

    def calls_of(self, optimizer, step):
        """Register a hook before and after; return what was called in three steps, each with less."""
        log = []
        before = optimizer.register_step_pre_hook(lambda *given: log.append(("before", *given)))
        after = optimizer.register_step_post_hook(lambda *given: log.append(("after", *given)))
        everywhere = register_optimizer_step_post_hook(lambda *given: log.append(("every", *given)))
        step()
        before.remove()
        step()
        after.remove()
        everywhere.remove()
        step()
        for entry in log:
            self.assertIs(entry[1], optimizer)
            self.assertEqual((entry[2][0], entry[2][1:], entry[3]), (optimizer, (), {}))
        return [entry[0] for entry in log]

    def test_of_a_step(self):
        def worker(comm):
            module = Odd()
            optimizer = optimizer_for(module, comm)

            def step():
                put_gradients(module, comm.rank, 0)
                optimizer.step()

            return self.calls_of(optimizer, step)

        self.assertEqual(virtual(1, worker), [["before", "after", "every", "after", "every"]])

    def test_torch_does_the_same(self):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        self.assertEqual(self.calls_of(optimizer, optimizer.step), ["before", "after", "every", "after", "every"])

    def test_a_hook_before_the_step_may_change_what_is_stepped_with(self):
        def worker(comm):
            module = Odd()
            optimizer, given = optimizer_for(module, comm), []

            def slower(optimizer, args, kwargs):
                given.append(kwargs)
                optimizer.param_groups[0]["lr"] = 0.0
                return args, {"closure": lambda: torch.tensor(5.0)}

            optimizer.register_step_pre_hook(slower)
            put_gradients(module, comm.rank, 0)
            before = module.first.weight.clone()
            loss = optimizer.step(closure=lambda: torch.tensor(4.0))
            return loss.item(), len(given), torch.equal(before, module.first.weight)

        self.assertEqual(virtual(2, worker), [(5.0, 1, True)] * 2)

    def test_of_a_state(self):
        def worker(comm):
            log = []
            optimizer = optimizer_for(Odd(), comm)
            optimizer.register_state_dict_pre_hook(lambda which: log.append(("saving", which is optimizer)))
            optimizer.register_state_dict_post_hook(lambda which, state: state | {"note": 7 + comm.rank})
            state = optimizer.state_dict()
            saved = copy_of(state)
            saved["steps"] = 3

            def loading(which, state):
                log.append(("loading", state["note"], which.steps))
                return state | {"steps": state["steps"] + 1}

            optimizer.register_load_state_dict_pre_hook(loading)
            optimizer.register_load_state_dict_post_hook(lambda which: log.append(("loaded", which.steps)))
            optimizer.load_state_dict(saved)
            return log

        for rank, log in enumerate(virtual(2, worker)):
            self.assertEqual(log, [("saving", True), ("loading", 7 + rank, 0), ("loaded", 4)])


if __name__ == "__main__":
    unittest.main()
