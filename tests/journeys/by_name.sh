# A config that comes along, by its name; a signal in the middle of the run; going on, to the weights
# of a run that nothing has stopped; and finetuning from it, by another config that comes along.

loaders='train_dataloader.num_workers=0 train_dataloader.persistent_workers=False'
unmeasured='val_dataloader=None val_cfg=None val_evaluator=None custom_hooks=[]'
few="$loaders $unmeasured train_dataloader.batch_size=16 default_hooks.report=None default_hooks.logger.interval=1"

memengine train dino_vit --cfg-options $few &
run=$!
until [ "$(cat work_dirs/dino_vit/*/vis_data/scalars.json 2> /dev/null | wc -l)" -ge 3 ]; do
    kill -0 $run # or it has ended
    sleep 0.2
done
kill -TERM $run
status=0
wait $run || status=$?
[ $status = 143 ]

last=$(basename "$(cat work_dirs/dino_vit/last_checkpoint)" .pth)
end=$((${last#iter_} + 2))
memengine train dino_vit --resume --max-iters $end --cfg-options $few
memengine train dino_vit --work-dir whole --max-iters $end --cfg-options $few
python - work_dirs/dino_vit/iter_$end.pth whole/iter_$end.pth <<'END'
import sys

import torch

from memengine.engine.checkpoint.files import safe_loading

one, other = sys.argv[1:]
with safe_loading(one):
    one = torch.load(one)['state_dict']
with safe_loading(other):
    other = torch.load(other)['state_dict']
assert one.keys() == other.keys()
assert all(torch.equal(one[name], other[name]) for name in one), 'other weights'
END

measured='custom_hooks=[] val_dataloader.dataset.bank.indices=60 val_dataloader.dataset.queries.indices=20'
memengine train finetune_vit --max-iters 2 --cfg-options $loaders $measured
grep -q 'its teacher.backbone into backbone' work_dirs/finetune_vit/*/*.log
memengine test finetune_vit work_dirs/finetune_vit/iter_2.pth --cfg-options ${measured//val_/test_} | grep top1
