/* Draws random bits as the rounding draws them, for the batteries of TestU01.

     cc -O3 -march=native -DROUNDS=13 ... (test.py has the whole line)
     random_bits LANES ALONG KEY BATTERY [TEST...]
     random_bits LANES ALONG KEY write [WORDS]

   ROUNDS The cipher's, which compilers unroll.
   LANES  The lanes of each block that are used, in this order: "0123" is the block's two
          words, "7" one lane, "46" a pair. Two lanes in sequence make a word of 32 bits,
          the first one in its low half.
   ALONG  "rows": one leaf of as many rows as are asked for. "steps": the first row
          alone, in as many steps as are asked for.
   KEY    The second word of the state's key, as of jax.random.key(KEY).

   A BATTERY (SmallCrush, Crush or BigCrush) runs test after test on a stream that goes on
   from one to the next. Where no TEST is named it runs all, in an order that mixes their
   kinds, so that a part of a battery says something of every kind. After each test it
   prints its p-values, a line each: "p-value", the test's number, the value, the name.
   "write" writes words to the standard output, WORDS or without end. streams.py
   has a model of these streams. */

#include <bbattery.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <swrite.h>
#include <unif01.h>

enum { COLUMNS = 512, LANES = 8, ROTATIONS = 8 };
static const int rotations[ROTATIONS] = {13, 15, 26, 6, 17, 29, 16, 24};

/* Two words for the name of a leaf; any would do. */
static const uint32_t name[2] = {0x51f09e3c, 0x8d2a6b47};

static struct {
  int lanes[LANES], count; /* in their order */
  int along_steps;
  uint32_t state_key, row, step;
  uint16_t halves[COLUMNS * LANES];
  int used, size; /* of the halves */
} stream;

static inline uint32_t rotate(uint32_t x, int by) {
  return x << by | x >> (32 - by);
}

static inline void threefry(int rounds, const uint32_t key[2], uint32_t x[2]) {
  uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1bd11bda};
  uint32_t a = x[0] + keys[0], b = x[1] + keys[1];
  for (int round = 0; round < rounds; round++) {
    a += b;
    b = rotate(b, rotations[round % ROTATIONS]) ^ a;
    if (round % 4 == 3) {
      int group = round / 4 + 1;
      a += keys[group % 3];
      b += keys[(group + 1) % 3] + group;
    }
  }
  x[0] = a, x[1] = b;
}

/* As jax.random.fold_in: always 20 rounds. */
static void fold_in(uint32_t key[2], uint32_t number) {
  uint32_t x[2] = {0, number};
  threefry(20, key, x);
  memcpy(key, x, sizeof x);
}

/* Draws the lanes of a row, and goes on to the next row or step. */
static void fill(void) {
  uint32_t key[2] = {0, stream.state_key};
  fold_in(key, stream.step);
  fold_in(key, name[0]);
  fold_in(key, name[1]);
  static uint32_t words[4][COLUMNS]; /* two lanes each */
  for (uint32_t column = 0; column < COLUMNS; column++) {
    uint32_t x[2] = {stream.row, column};
    threefry(ROUNDS, key, x);
    words[0][column] = x[0];
    words[1][column] = x[1];
    words[2][column] = x[0] ^ x[1];
    words[3][column] = x[0] ^ rotate(x[1], 16);
  }
  for (int i = 0; i < stream.count; i++) {
    int lane = stream.lanes[i], shift = 16 * (lane % 2);
    for (int column = 0; column < COLUMNS; column++)
      stream.halves[column * stream.count + i] = words[lane / 2][column] >> shift;
  }
  stream.used = 0;
  *(stream.along_steps ? &stream.step : &stream.row) += 1;
}

static unsigned int next(void) {
  if (stream.used == stream.size) fill();
  const uint16_t *half = stream.halves + stream.used;
  stream.used += 2;
  return half[0] | (uint32_t)half[1] << 16;
}

static void write_words(uint64_t count) {
  uint32_t words[1024];
  for (uint64_t done = 0; count == 0 || done < count;) {
    size_t size = 0;
    while (size < 1024 && (count == 0 || done < count)) words[size++] = next(), done++;
    if (fwrite(words, sizeof *words, size, stdout) != size) exit(1);
  }
}

static void test(void (*battery)(unif01_Gen *, int *), int number) {
  int repetitions[256] = {0};
  unif01_Gen *generator = unif01_CreateExternGenBits("random_bits", next);
  repetitions[number] = 1;
  battery(generator, repetitions);
  unif01_DeleteExternGenBits(generator);
  for (int i = 0; i < bbattery_NTests; i++) {
    const char *title = bbattery_TestNames[i];
    printf("p-value %d %.17g %s\n", number, bbattery_pVal[i], title);
  }
  fflush(stdout);
}

int main(int count, char **arguments) {
  if (count < 5) return fputs("see the comment on top of random_bits.c\n", stderr), 2;
  for (const char *lane = arguments[1]; *lane; lane++)
    stream.lanes[stream.count++] = *lane - '0';
  stream.along_steps = !strcmp(arguments[2], "steps");
  stream.state_key = strtoul(arguments[3], NULL, 0);
  stream.used = stream.size = COLUMNS * stream.count;
  const char *what = arguments[4];
  swrite_Basic = FALSE;
  if (!strcmp(what, "write"))
    return write_words(count > 5 ? strtoull(arguments[5], NULL, 0) : 0), 0;
  int small = !strcmp(what, "SmallCrush"), crush = !strcmp(what, "Crush");
  int tests = small ? 10 : crush ? 96 : 106;
  void (*battery)(unif01_Gen *, int *) = small   ? bbattery_RepeatSmallCrush
                                         : crush ? bbattery_RepeatCrush
                                                 : bbattery_RepeatBigCrush;
  for (int i = 5; i < count; i++) test(battery, atoi(arguments[i]));
  /* By steps of 7, until all have run: tests + 1 is a prime. */
  for (int i = 1; count == 5 && i <= tests; i++) test(battery, 7 * i % (tests + 1));
  return 0;
}
