# One process, and two that have half of each of its batches: the same losses. What the two have
# begun, one goes on with.

few='train_dataloader.num_workers=0 train_dataloader.persistent_workers=False val_dataloader=None
    val_cfg=None val_evaluator=None custom_hooks=[] default_hooks.report=None default_hooks.logger.interval=1'
half=train_dataloader.batch_size=32

memengine train dino_vit --work-dir one --max-iters 4 --cfg-options $few
torchrun --standalone --nproc_per_node 2 --no-python memengine train dino_vit --launcher pytorch \
    --work-dir two --max-iters 2 --cfg-options $few $half
memengine train dino_vit --work-dir two --resume --max-iters 4 --cfg-options $few
python - <<'END'
import json
from pathlib import Path


def losses(run):
    lines = [line for file in Path(run).glob('*/vis_data/scalars.json') for line in file.open()]
    return {row['step']: row['loss'] for row in map(json.loads, lines) if 'loss' in row}


one, two = losses('one'), losses('two')
print(one, two)
assert list(one) == [1, 2, 3, 4]
assert all(abs(two[step] - one[step]) < 1e-2 * one[step] for step in one)
END
