# parallel.heads.heads_for_tokens
def heads_for_tokens(x, group=None):
    moved = x.movedim(-3, 0)  # (h, ..., c, d)
    return all_to_all(moved, 0, moved.dim() - 2, group).movedim(0, -3)


# parallel.heads.head_attention
import torch


def head_attention(query, key, value, *, causal=False, window=None, scale=None, group=None):
    both = torch.cat([key, value], dim=-1)
    kv_heads, d_k = both.shape[-3], key.shape[-1]
    if kv_heads < ranks:
        numbers = [rank * kv_heads // ranks for rank in range(ranks)]
        both = both[..., numbers, :, :]
    both = all_to_all(both, -3, -2, group)
    q = all_to_all(query, -3, -2, group)
    own = [slice(a * both.shape[-3] // q.shape[-3], None) for a in range(q.shape[-3])]
    outputs = [
        flash_attention(
            q[..., a, :, :],
            both[..., own[a].start, :, :d_k],
            both[..., own[a].start, :, d_k:],
            causal=causal,
            window=window,
            scale=scale,
        )
        for a in range(q.shape[-3])
    ]
    return all_to_all(torch.stack(outputs, dim=-3), -2, -3, group)


# parallel.shard.SplitRows
class SplitRows:
    def _apply(self, module, device_mesh):
        for name, placement in ("W", Shard(0)), ("b", Replicate()):
            whole = getattr(module, name)
            if whole is not None:
                part = distribute_tensor(whole.detach(), device_mesh, [placement])
                module.register_parameter(name, nn.Parameter(part))

        def before(layer, inputs):
            (x,) = inputs
            return DTensor.from_local(x, device_mesh, [Shard(x.dim() - 1)])

        module.register_forward_pre_hook(before)
        module.register_forward_hook(lambda layer, inputs, output: output.full_tensor())
        return module


# parallel.shard.split_layers
def split_layers(model, mesh):
    styles = {}
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        styles[f"attention.{name}"] = SplitRows() if "out" in name else SplitColumns()
    for name, style in ("linear_1", SplitColumns), ("linear_2", SplitRows):
        styles[f"feed_forward.{name}"] = style()
    for number in range(len(model.blocks)):
        layer = model.blocks[number].attention
        layer.num_heads = layer.num_heads // mesh.size()
        layer.num_kv_heads = layer.num_kv_heads // mesh.size()
        parallelize_module(model.blocks[number], mesh, plan | styles)
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.broadcast(parameter.data, group=mesh.get_group(), group_src=0)
    return model


# parallel.shard.token_mean
def token_mean(losses, group=None):
    parts = [None] * ranks
    dist.all_gather_object(parts, [float(x) for x in losses.flatten()], group)
    every = [x for part in parts for x in part]
    if not every:
        raise ValueError("losses: expected a token on some rank, got none")
    own = (losses * ranks / len(every)).sum()
    return own, losses.new_tensor(sum(every) / len(every))


# parallel.checkpoints.save_checkpoint
def save_checkpoint(folder, step, model, optimizer, keep=2):
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(folder):
            if name.startswith("partial-"):
                shutil.rmtree(folder / name)
    dist.barrier()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=partial)
    dist.barrier()
    if dist.get_rank() == 0:
        if done.exists():
            shutil.rmtree(done)
        partial.rename(done)
        flush(folder)
        whole = finished(folder)
        while len(whole) > keep:
            shutil.rmtree(whole.pop(0))
    dist.barrier()
    return done
