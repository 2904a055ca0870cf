"""AdamW over the flat buffers: fp32 master weights, decoupled weight decay on matrices only, one global norm."""

import torch

from memo.flat import views, weight_decay_ranges


class Optimizer:
    """Owns the fp32 master weights (the parameters themselves where those are fp32) and the two moments, all flat."""

    def __init__(self, model, cfg):
        self.model = model
        self.master = model.params if model.params.dtype == torch.float32 else model.params.float()
        self.exp_avg = torch.zeros_like(self.master)
        self.exp_avg_sq = torch.zeros_like(self.master)
        self.steps = torch.zeros((), device=self.master.device)
        groups = {True: dict(params=[], weight_decay=cfg.weight_decay), False: dict(params=[], weight_decay=0.0)}
        state = {}
        for start, end, decays in weight_decay_ranges(model.layout):
            p = self.master[start:end]
            p.grad = model.grads[start:end]
            groups[decays]["params"].append(p)
            state[p] = dict(exp_avg=self.exp_avg[start:end], exp_avg_sq=self.exp_avg_sq[start:end])
        self.adamw = torch.optim.AdamW(groups.values(), betas=(cfg.beta1, cfg.beta2), eps=1e-8, fused=True)
        self.adamw.state.update(state)

    def load(self, named_tensors):
        """Copies (name, fp32 tensor) pairs into the master weights and the model's parameters."""
        mine = views(self.model.layout, self.master)
        for name, tensor in named_tensors:
            mine[name].copy_(tensor)
        self.model.params.copy_(self.master)

    def clip(self, max_norm):
        """Scales the gradients to a global norm of at most `max_norm` (0: leaves them); returns the norm before."""
        norm = torch.linalg.vector_norm(self.model.grads)
        if max_norm > 0:
            self.model.grads.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def step(self, lr):
        """One AdamW step at learning rate `lr`; the model's parameters follow, and its gradients are zero again."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        for state in self.adamw.state.values():
            state["step"] = self.steps.clone()
        self.adamw.step()
        self.steps += 1
        if self.master is not self.model.params:
            self.model.params.copy_(self.master)
        self.model.grads.zero_()
