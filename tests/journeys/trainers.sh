# Trainers of other libraries, with the lines of memengine that each script numbers: what autograd
# keeps is less, the step is the same.

python - > lacking.txt <<'END'
import importlib.util

peers = ['accelerate', 'lightning', 'transformers']
lacking = [name for name in peers if importlib.util.find_spec(name) is None]
print('pip install ' + ' '.join(lacking) if lacking else '')
END
if grep pip lacking.txt; then exit 77; fi

for name in lightning_module lightning_gradient_cache transformers_trainer accelerate_loop; do
    cp "$CHECKOUT/examples/beside/$name.py" .
    python $name.py > $name.txt
    grep saved $name.txt
done
grep 'same weights: True' lightning_module.txt transformers_trainer.txt
