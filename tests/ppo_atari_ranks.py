"""What test_ppo_atari.py runs in each process of torchrun: `MODE FOLDER`. They write into FOLDER what they saw."""

import json
import sys
from pathlib import Path

import gymnasium as gym
import ppo_atari as ppo
import torch
import torch.distributed as dist


def updates(folder: Path) -> None:
    """Start from unequal weights, then update on halves of a minibatch; with a nan in the second process; again."""
    args = ppo.Args(device="cpu")
    torch.manual_seed(args.rank)
    agent = ppo.Agent((4, 36, 36), 3)
    seen = {"drawn": parameters(agent)}
    optimizer = torch.optim.Adam(agent.parameters(), torch.tensor(1e-3), eps=1e-5, fused=True)
    ppo.join_processes(args, torch.device("cpu"), list(agent.state_dict().values()))
    seen |= {"start": parameters(agent), "gathered": ppo.gather({"rank": args.rank})}
    seen["mean"] = ppo.joint_mean(torch.tensor([1.0, 10.0]) * (args.rank + 1))
    minibatch = [x.chunk(args.world_size)[args.rank] for x in torch.load(folder / "minibatch.pt")]
    seen["moments"] = torch.stack(ppo.joint_moments(minibatch[3]))
    for name in ("first", "bad", "second"):
        given = [x.clone() for x in minibatch]
        if name == "bad" and args.rank == 1:
            given[4][0] = torch.nan  # a return: the loss of this process alone is not a number
        stats = ppo.update(agent, optimizer, given, torch.tensor(0.01), args)
        seen |= {name: parameters(agent), f"{name}_stats": stats}
    torch.save(seen, folder / f"rank_{args.rank}.pt")
    dist.destroy_process_group()


def parameters(agent) -> torch.Tensor:
    return torch.cat([x.detach().flatten() for x in agent.parameters()])


def main(folder: Path) -> None:
    """The whole script with the flags of flags.json; only evaluation is cut short."""
    make_eval_env = ppo.make_eval_env
    ppo.make_eval_env = lambda *given: gym.wrappers.TimeLimit(make_eval_env(*given), 5)
    args = ppo.Args(**json.loads((folder / "flags.json").read_text()))
    result = ppo.main(args)
    (folder / f"result_{args.rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    {"updates": updates, "main": main}[sys.argv[1]](Path(sys.argv[2]))
