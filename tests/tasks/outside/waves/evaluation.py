def measure(path, options, overrides, compose):
    import torch

    from foundry.engine.restore import restore

    restored = restore(path, options.which, ema=options.ema, trust=options.trust, device=options.device)
    values = torch.zeros(1, restored.config.data.window)
    with torch.no_grad():
        for _ in range(options.horizon):
            values = torch.cat((values[:, 1:], restored.model(values)[:, None]), dim=1)
    scale = restored.data.kept["scale.json"]
    return {"checkpoint": restored.checkpoint.name, "largest": scale.largest, "num_values": options.horizon}
