"""Make the data of two hospitals with unlike images: python examples/two_hospitals.py OUT

Each image has a spot in one of its quarters, or none. The north's machine gives dark
images with fine grain, the south's bright ones with stripes. Writes OUT/north.jsonl,
OUT/south.jsonl and OUT/test.jsonl, which has images of both that neither trains on.
"""

import argparse
import json
import pathlib

import numpy as np
from PIL import Image

SIZE = 64
QUARTERS = ("upper left", "upper right", "lower left", "lower right")


def image(draws: np.random.Generator, hospital: str, quarter: int | None) -> Image.Image:
    """One grey image, with a spot in a quarter or without one."""
    y, x = np.mgrid[:SIZE, :SIZE]
    if hospital == "north":
        pixels = 60 + draws.normal(0, 12, (SIZE, SIZE))
    else:
        pixels = 190 + 15 * np.sin(x / draws.uniform(2, 4) + draws.uniform(0, 6))
        pixels += draws.normal(0, 4, (SIZE, SIZE))
    if quarter is not None:
        cy, cx = (SIZE * (1 / 4 + part / 2) + draws.uniform(-6, 6) for part in divmod(quarter, 2))
        radius = draws.uniform(5, 9)
        spot = np.exp(-(((x - cx) ** 2 + (y - cy) ** 2) / radius**2))
        pixels += spot * (110 if hospital == "north" else -110)
    grey = np.clip(pixels, 0, 255).astype(np.uint8)
    return Image.fromarray(np.repeat(grey[..., None], 3, axis=2))


def records(folder: pathlib.Path, hospital: str, count: int, seed: int) -> list[dict]:
    """Two questions about each of ``count`` images."""
    draws, found = np.random.default_rng(seed), []
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for i in range(count):
        quarter = None if draws.random() < 0.3 else int(draws.integers(4))
        name = f"images/{hospital}-{seed}-{i}.png"
        image(draws, hospital, quarter).save(folder / name)
        answers = {
            "is there a spot?": "no" if quarter is None else "yes",
            "where is the spot?": "nowhere" if quarter is None else QUARTERS[quarter],
        }
        for question, answer in answers.items():
            content = [{"type": "image", "image": name}, {"type": "text", "text": question}]
            turns = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": answer},
            ]
            found.append({"id": f"{name} {question}", "messages": turns})
    return found


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("folder", type=pathlib.Path, metavar="OUT", help="the folder to write to")
    folder = parser.parse_args().folder
    files = {
        "north": records(folder, "north", 400, 1),
        "south": records(folder, "south", 200, 2),
        "test": records(folder, "north", 60, 3) + records(folder, "south", 60, 4),
    }
    for name, found in files.items():
        text = "".join(json.dumps(record) + "\n" for record in found)
        (folder / f"{name}.jsonl").write_text(text)
        print(f"{folder / name}.jsonl: {len(found)} records")


if __name__ == "__main__":
    main()
