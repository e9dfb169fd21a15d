"""The scripts that test_contract.py tests. A new one is one more entry; harness.Script says what each line means."""

from harness import Script
from toy_envs import Picture

# Flags and refusals that the PPO scripts have in common.
PPO_TINY = {
    "total_timesteps": 256, "num_steps": 32, "num_envs": 2, "num_minibatches": 4, "update_epochs": 2, "eval_every": 0,
    "eval_episodes": 1, "log_every": 64, "checkpoint_every": 0, "device": "cpu",
}  # fmt: skip
PPO_CHANGED = {
    "num_envs": 4, "total_timesteps": 320, "learning_rate": 1e-3, "anneal_lr": False, "adam_eps": 1e-1, "num_steps": 64,
    "gamma": 0.9, "gae_lambda": 0.5, "num_minibatches": 2, "update_epochs": 3, "norm_adv": False, "clip_coef": 1e-5,
    "clip_vloss": False, "vf_clip_coef": 1e-5, "ent_coef": 0.5, "ent_coef_end": (0.0, {"ent_coef": 0.5}),
    "vf_coef": 5.0, "max_grad_norm": 1e-3, "target_kl": 1e-9, "clip_reward": 0.1,
}  # fmt: skip
PPO_BAD_INPUT = [
    ({"total_timesteps": 63}, "--total-timesteps 63"),
    ({"num_envs": 0}, "--num-envs 0"),
    ({"num_steps": 0}, "--num-steps"),
    ({"num_minibatches": 33}, "--num-minibatches 33"),
    ({"num_minibatches": 65, "norm_adv": False}, "--num-minibatches 65"),
    ({"update_epochs": 0}, "--update-epochs"),
    ({"gamma": 1.01}, "--gamma 1.01"),
    ({"gae_lambda": -0.1}, "--gae-lambda"),
    ({"clip_coef": 0.0}, "--clip-coef"),
    ({"vf_clip_coef": 0.0}, "--vf-clip-coef"),
    ({"clip_reward": -1.0}, "--clip-reward"),
    ({"max_grad_norm": 0.0}, "--max-grad-norm"),
    ({"adam_eps": 0.0}, "--adam-eps"),
    ({"ent_coef": -0.1}, "--ent-coef"),
    ({"ent_coef_end": -0.1}, "--ent-coef-end"),
    ({"vf_coef": -0.1}, "--vf-coef"),
    ({"target_kl": 0.0}, "--target-kl"),
]


def shrink_pictures(module, monkeypatch) -> None:
    """Pictures of 36 x 36 in training and evaluation; the script's make_envs and make_eval_env stay as they are."""

    def wrapper(env, *arguments, **keywords):
        size = 36 if isinstance(env.unwrapped, Picture) else 84
        return real(env, *arguments, screen_size=size, **keywords)

    real = module.AtariWrapper
    monkeypatch.setattr(Picture, "side", 36)
    monkeypatch.setattr(module, "AtariWrapper", wrapper)


PPO_CONTINUOUS = Script(
    name="ppo_continuous",
    tiny={"env_id": "toy_envs:Line-v0", **PPO_TINY},
    parts={"agent", "optimizer", "obs_rms", "reward_rms"},
    varied={"env_id": "Pendulum-v1"},
    process={"env_id": "Pendulum-v1"},
    real=[{"env_id": "HalfCheetah-v5", "total_timesteps": 512, "num_steps": 128}],
    known=({"env_id": "toy_envs:Counter-v0", "num_steps": 33}, {"return": 4, "length": 4, "reward": 1}),
    other_env="Pendulum-v1",
    unrenderable="toy_envs:Constant-v0",
    faults={
        "toy_envs:Faulty_nan_obs-v0": "observation",
        "toy_envs:Faulty_nan_reward-v0": "reward",
        "toy_envs:Faulty_huge_reward-v0": "not finite",
        "toy_envs:Faulty_inf_final-v0": "inf",
        "toy_envs:Faulty_raise-v0": "simulator broke",
    },
    evaluation_fault="toy_envs:Faulty_raise-v0",
    poisoned=("compute_gae", 2, 2),  # one of four minibatches in each of two epochs
    schedule=({}, "charts/learning_rate"),
    loss="value_loss",
    resume=[
        ({"ent_coef": 0.01, "ent_coef_end": 0.0, "log_every": 128}, {"charts/learning_rate", "losses/ent_coef"}),
        ({"kl_penalty": True, "target_kl": 1e-4, "log_every": 64}, {"charts/learning_rate", "losses/kl_coef"}),
    ],
    changed={
        **PPO_CHANGED,
        "env_id": "Pendulum-v1",
        "eval_episodes": (2, {"env_id": "Pendulum-v1"}),  # Line's episodes are all the same
        "kl_penalty": True,
        "kl_coef": (50.0, {"kl_penalty": True}),
        "norm_obs": False,
        "clip_obs": 0.1,
        "norm_reward": False,
    },
    bad_input=[
        *PPO_BAD_INPUT,
        ({"env_id": "HalfCheetah-v99"}, "HalfCheetah-v99"),
        ({"env_id": "CartPole-v1"}, "dqn.py"),
        ({"env_id": "toy_envs:Other_image-v0"}, "ppo_atari.py"),
        ({"env_id": "toy_envs:Other_dict-v0"}, "FlattenObservation"),
        ({"env_id": "toy_envs:Other_integer_action-v0"}, "Box of floats"),
        ({"clip_obs": 0.0}, "--clip-obs"),
        ({"kl_coef": -1.0}, "--kl-coef"),
    ],
)

PPO_ATARI = Script(
    name="ppo_atari",
    tiny={"env_id": "toy_envs:Picture-v0", "noop_max": 0, **PPO_TINY},
    parts={"agent", "optimizer"},
    varied={"env_id": "toy_envs:PictureRandom-v0"},
    process={"env_id": "toy_envs:PictureRandom-v0"},
    real=[{"env_id": "ALE/Breakout-v5", "noop_max": 30, "sticky_actions": 0.25}],
    known=({"env_id": "toy_envs:PictureConstant-v0", "num_steps": 33}, {"return": 12, "length": 4, "reward": 3}),
    other_env="toy_envs:PictureFourButtons-v0",
    unrenderable="toy_envs:PictureBlind-v0",
    faults={
        "toy_envs:PictureFaulty_nan_reward-v0": "reward",
        "toy_envs:PictureFaulty_inf_reward-v0": "inf",
        "toy_envs:PictureFaulty_raise-v0": "simulator broke",
    },
    evaluation_fault="toy_envs:PictureFaulty_raise-v0",
    poisoned=("compute_gae", 2, 2),
    schedule=({}, "charts/learning_rate"),
    loss="value_loss",
    resume=[
        ({"ent_coef": 0.01, "ent_coef_end": 0.0, "log_every": 128}, {"charts/learning_rate", "losses/ent_coef"}),
        ({"target_kl": 1e-6, "bf16": True}, {"charts/learning_rate"}),
    ],
    changed={
        **PPO_CHANGED,
        "env_id": "toy_envs:PictureRandom-v0",
        "eval_episodes": 2,
        "sticky_actions": 0.5,
        "noop_max": 30,
        "bf16": True,
    },
    bad_input=[
        *PPO_BAD_INPUT,
        ({"env_id": "ALE/NoSuchGame-v5"}, "NoSuchGame"),
        ({"env_id": "CartPole-v1"}, "dqn.py"),
        ({"env_id": "Pendulum-v1"}, "ppo_continuous.py"),
        ({"env_id": "toy_envs:Other_dict-v0"}, "--env-id"),
        ({"sticky_actions": 1.5}, "--sticky-actions 1.5"),
        ({"noop_max": -1}, "--noop-max"),
    ],
    shrink=shrink_pictures,
)

# Flags, faults and refusals that sac.py and td3.py have in common. Every second step of both environments is followed
# by an update: 16 in a unit.
OFF_POLICY_TINY = {
    "env_id": "toy_envs:Line-v0", "total_timesteps": 256, "num_envs": 2, "learning_starts": 2, "utd_ratio": 0.25,
    "batch_size": 8, "hidden_size": 8, "buffer_size": 1000, "eval_every": 0, "eval_episodes": 1, "log_every": 64,
    "checkpoint_every": 0, "device": "cpu",
}  # fmt: skip
OFF_POLICY_CHANGED = {
    "env_id": "Pendulum-v1", "eval_episodes": (2, {"env_id": "Pendulum-v1"}), "num_envs": 4, "total_timesteps": 320,
    "buffer_size": 16, "batch_size": 16, "learning_starts": 32, "utd_ratio": 0.5, "hidden_size": 16, "gamma": 0.9,
    "tau": 0.5, "max_grad_norm": 1e-3,
}  # fmt: skip
OFF_POLICY_BAD_INPUT = [
    ({"total_timesteps": 1}, "--total-timesteps 1"),
    ({"num_envs": 0}, "--num-envs 0"),
    ({"batch_size": 0}, "--batch-size 0"),
    ({"buffer_size": 0}, "--buffer-size 0"),
    ({"buffer_size": 50, "learning_starts": 51}, "--learning-starts 51"),
    ({"buffer_size": 5, "num_envs": 4, "learning_starts": 5}, "--learning-starts 5"),
    ({"buffer_size": 3, "num_envs": 4}, "--buffer-size 3"),
    ({"buffer_size": 10**12}, "--buffer-size"),  # more than there is
    ({"hidden_size": 10**12}, "--hidden-size"),
    ({"learning_starts": 0}, "--learning-starts 0"),
    ({"utd_ratio": -1.0}, "--utd-ratio"),
    ({"policy_frequency": 0}, "--policy-frequency 0"),
    ({"hidden_size": 0}, "--hidden-size"),
    ({"gamma": 1.01}, "--gamma 1.01"),
    ({"tau": 0.0}, "--tau 0"),
    ({"tau": 1.1}, "--tau 1.1"),
    ({"max_grad_norm": 0.0}, "--max-grad-norm"),
    ({"log_every": 0}, "--log-every 0"),
    ({"env_id": "HalfCheetah-v99"}, "HalfCheetah-v99"),
    ({"env_id": "CartPole-v1"}, "dqn.py"),
    ({"env_id": "toy_envs:Other_image-v0"}, "ppo_atari.py"),
    ({"env_id": "toy_envs:Other_dict-v0"}, "FlattenObservation"),
    ({"env_id": "toy_envs:Other_integer_action-v0"}, "Box of floats"),
    ({"env_id": "toy_envs:Other_unbounded-v0"}, "ppo_continuous.py"),
]
OFF_POLICY = {
    "varied": {"env_id": "Pendulum-v1"},
    "process": {"env_id": "Pendulum-v1"},
    "real": [{"env_id": "HalfCheetah-v5", "hidden_size": 256, "batch_size": 256}],
    "known": ({"env_id": "toy_envs:Counter-v0"}, {"return": 4, "length": 4, "reward": 1}),
    "other_env": "Pendulum-v1",
    "unrenderable": "toy_envs:Constant-v0",
    "faults": PPO_CONTINUOUS.faults,
    "evaluation_fault": PPO_CONTINUOUS.evaluation_fault,
    "updates": 16,
    "loss": "qf_loss",
    "own_flags": {"checkpoint_replay"},
}

SAC = Script(
    name="sac",
    tiny=OFF_POLICY_TINY,
    **OFF_POLICY,
    parts={"agent", "critic_optimizer", "policy_optimizer"},
    poisoned=("soft_td_target", 20, 1),
    rate="policy_lr",
    schedule=None,
    resume=[
        ({"checkpoint_replay": True, "num_critics": 3}, {"losses/alpha", "losses/qf_loss"}),
        ({"checkpoint_replay": True, "buffer_size": 50, "utd_ratio": 0.26, "policy_frequency": 3}, {"losses/alpha"}),
    ],
    changed={
        **OFF_POLICY_CHANGED,
        "policy_lr": 1e-2,
        "q_lr": 1e-2,
        "policy_frequency": 2,
        "num_critics": 3,
        "critic_subset": 1,
        "layer_norm": True,
        "autotune": False,
        "alpha": 0.1,
        "target_entropy": 1.0,
    },
    bad_input=[
        *OFF_POLICY_BAD_INPUT,
        ({"policy_lr": 0.0}, "--policy-lr"),
        ({"q_lr": -1.0}, "--q-lr"),
        ({"alpha": 0.0}, "--alpha"),
        ({"num_critics": 0}, "--num-critics"),
        ({"critic_subset": 3}, "--critic-subset 3"),
        ({"target_entropy": float("nan")}, "--target-entropy"),
    ],
)

TD3 = Script(
    name="td3",
    tiny=OFF_POLICY_TINY,
    **OFF_POLICY,
    parts={"agent", "critic_optimizer", "policy_optimizer"},
    poisoned=("td_target", 20, 1),
    schedule=({"exploration_noise_end": 0.0}, "charts/exploration_noise"),
    resume=[
        ({"checkpoint_replay": True, "exploration_noise_end": 0.0}, {"charts/exploration_noise", "losses/qf_loss"}),
        ({"checkpoint_replay": True, "noise": "ou", "buffer_size": 50, "utd_ratio": 0.26}, {"losses/actor_loss"}),
    ],
    changed={
        **OFF_POLICY_CHANGED,
        "learning_rate": 1e-2,
        # Where the first critic is not below the other all the time.
        "clipped_double_q": (False, {"env_id": "Pendulum-v1", "seed": 2}),
        "delayed_policy": False,
        "policy_frequency": 3,
        "target_smoothing": False,
        "policy_noise": 0.4,
        "noise_clip": 0.05,
        "noise": "ou",
        "exploration_noise": 0.5,
        "exploration_noise_end": 0.0,
    },
    bad_input=[
        *OFF_POLICY_BAD_INPUT,
        ({"learning_rate": 0.0}, "--learning-rate"),
        ({"policy_noise": -0.1}, "--policy-noise"),
        ({"policy_noise": 1e6}, "--policy-noise 1000000"),
        ({"noise_clip": 0.0}, "--noise-clip"),
        ({"exploration_noise": -0.1}, "--exploration-noise"),
        ({"exploration_noise_end": -0.1}, "--exploration-noise-end"),
    ],
)

# Of a changed copy (SCRIPTS_DIR) only what is there is tested.
SCRIPTS = [script for script in (PPO_CONTINUOUS, PPO_ATARI, SAC, TD3) if script.path.exists()]
