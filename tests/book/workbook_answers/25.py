# parallel.heads.heads_for_tokens
def heads_for_tokens(x, group=None):
    moved = x.movedim(-3, 0)  # (h, ..., c, d)
    return all_to_all(moved, 0, moved.dim() - 2, group).movedim(0, -3)


# parallel.heads.head_attention
def head_attention(query, key, value, *, causal=False, group=None):
    heads, kv_heads = (1 if x.dim() < 3 else x.shape[-3] for x in (query, key))
    if ranks != 1:
        if mask is not None:
            mask = mask_for_heads(mask, query, group)
        both, d_k = torch.cat([key, value], dim=-1), key.shape[-1]
        if kv_heads < ranks:
            both = both[..., [r * kv_heads // ranks for r in range(ranks)], :, :]
        both = all_to_all(both, -3, -2, group)
        query = all_to_all(query, -3, -2, group)
        key, value = both[..., :d_k], both[..., d_k:]
    if heads != kv_heads:
        own = query.shape[-3]
        shared = [a * key.shape[-3] // own for a in range(own)]
        key, value = key[..., shared, :, :], value[..., shared, :, :]
    if sink is None and not return_lse:
        attention = FlashAttention(causal, scale, window=window)
        output, _ = attention(query, key, value, mask)
        return tokens_for_heads(output, group) if ranks > 1 else output
    options = {"causal": causal, "window": window, "scale": scale}
    output, lse = flash_attention(query, key, value, mask, **options, return_lse=True)
    if ranks > 1:
        output = tokens_for_heads(output, group)
        lse = all_to_all(lse, split_dim=-1, concat_dim=-2, group=group)
    if sink is not None:
        output, lse = add_sink(output, lse, sink)
    return (output, lse) if return_lse else output


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
    broadcast_first(model, mesh)
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
def save_checkpoint(
    folder, step, model, optimizer, *, schedule=None, settings=None, keep=2
):
    def finish():
        if not first:
            return []
        flush(partial)
        partial.rename(done)
        flush(done.parent)
        whole = finished(folder)
        while len(whole) > keep:
            old = f"{whole.pop(0):08d}"
            gone = Path(folder) / f"partial-{old}"
            Path(folder, f"step-{old}").rename(gone)
            shutil.rmtree(gone)
        return []

    claim_folder(folder)
    agree_after("save_checkpoint", begin)
    agree_after("save_checkpoint", lambda: refuse_unseen(partial))
    dcp.save({"model": model.state_dict(), "optimizer": tensors}, checkpoint_id=partial)
    agree_after("save_checkpoint", list)
    found = digests(partial)
    agree_after("save_checkpoint", lambda: seal(partial, found))
    agree_after("save_checkpoint", finish)
    return done
