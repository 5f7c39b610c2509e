# A technique of one's own, in a package that is installed: memengine lists it, checks its settings,
# and trains with it; in a loop of one's own it is one call.

mkdir -p site/keep_in_bf16-1.0.dist-info mine
sed -n '/^# mine\/keep_in_bf16.py$/,/^```$/{/^```$/!p}' "$CHECKOUT/docs/extend.md" > site/keep_in_bf16.py
printf 'Metadata-Version: 2.1\nName: keep_in_bf16\nVersion: 1.0\n' > site/keep_in_bf16-1.0.dist-info/METADATA
printf '[memengine.techniques]\nkeep_in_bf16 = keep_in_bf16\n' > site/keep_in_bf16-1.0.dist-info/entry_points.txt
export PYTHONPATH=$PWD/site:${PYTHONPATH:-} # where pip would have put it

memengine techniques | grep keep_in_bf16
memengine techniques keep_in_bf16 | grep 'smaller tensors stay as they are'
few='train_dataloader.num_workers=0 train_dataloader.persistent_workers=False val_dataloader=None
    val_cfg=None val_evaluator=None custom_hooks=[] default_hooks.report=None train_dataloader.batch_size=16'
memengine train dino_vit --max-iters 2 --cfg-options keep_in_bf16=64 $few | grep 'MiB are kept'
if memengine train dino_vit --cfg-options keep_in_bf16.min_numl=64 $few 2> wrong.txt; then exit 1; fi
grep "did you mean 'min_numel'" wrong.txt

python - <<'END'
import torch

from memengine import SavedBytes, apply_techniques


def kept(**techniques):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    if techniques:
        apply_techniques(model, **techniques)
    with SavedBytes(model) as saved:
        model(torch.randn(128, 64)).square().mean().backward()
    return saved.peak_bytes


plain, half = kept(), kept(keep_in_bf16=1)
print(plain, half)
assert half < 0.6 * plain
END
