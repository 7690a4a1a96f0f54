"""Step 1 of 2: a byte-level BPE tokenizer and a small Qwen3 target, trained from scratch."""

import time
from pathlib import Path

import torch
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from drafter_training.optimizers import cosine, muon_and_adamw, step_all

VOCAB_SIZE = 2048
END, MASK, IM_START, IM_END = "<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"
# The model has never seen a conversation: the template only makes the chat route answer.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def train_tokenizer(texts: list[str], out: Path) -> PreTrainedTokenizerFast:
    """Train and save a byte-level BPE of 2,048 entries with a mask token for the drafter."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, MASK, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END, pad_token=END, mask_token=MASK
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return tokenizer


def train_target(
    texts: list[str], held_out: list[str], out: Path, *, minutes: float, progress: Progress
) -> None:
    """Train for `minutes` of wall time (the learning rate follows the clock) and save in bf16."""
    tokenizer = train_tokenizer(texts, out)
    streams = []
    for split in (texts, held_out):
        ids = [i for e in tokenizer(split)["input_ids"] for i in (*e, tokenizer.eos_token_id)]
        streams.append(torch.tensor(ids))
    stream, held_out_stream = streams
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    optimizers = muon_and_adamw(model)
    generator = torch.Generator().manual_seed(0)
    length, batch_size = 512, 8
    task = progress.add_task("target", total=minutes * 60)
    started = time.monotonic()
    step = 0
    while (elapsed := time.monotonic() - started) < minutes * 60:
        starts = torch.randint(len(stream) - length - 1, (batch_size,), generator=generator)
        batch = torch.stack([stream[s : s + length] for s in starts.tolist()])  # [B, T]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        step_all(optimizers, model, 4e-3 * cosine(elapsed / (minutes * 60)))
        step += 1
        if step % 10 == 0:
            progress.update(
                task, completed=elapsed, description=f"target: step {step}, loss {loss.item():.3f}"
            )
    model.eval()
    with torch.inference_mode():
        windows = held_out_stream[: len(held_out_stream) // length * length].view(-1, length)[:64]
        held_out_loss = model(input_ids=windows, labels=windows).loss.item()
    seen = step * batch_size * length
    progress.console.print(
        f"target: {step} steps, {seen / 1e6:.1f} M tokens seen of a corpus of"
        f" {len(stream) / 1e6:.1f} M, held-out loss {held_out_loss:.3f}"
    )
    model.to(torch.bfloat16).save_pretrained(out)
