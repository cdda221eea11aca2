#include "prefix/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "prefix/sha256_constants.h"
#include "prefix/sha256_instructions.h"

namespace tokenspeed {
namespace {

uint32_t LoadBigEndian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

void StoreBigEndian(uint32_t value, uint8_t* bytes) {
  for (int i = 0; i < 4; ++i) bytes[i] = static_cast<uint8_t>(value >> (24 - 8 * i));
}

}  // namespace

void Sha256::Update(std::span<const uint8_t> bytes) {
  if (bytes.empty()) return;
  total_bytes_ += bytes.size();
  if (pending_bytes_ > 0) {
    const std::size_t taken = std::min(bytes.size(), kBlockBytes - pending_bytes_);
    std::memcpy(pending_.data() + pending_bytes_, bytes.data(), taken);
    pending_bytes_ += taken;
    bytes = bytes.subspan(taken);
    if (pending_bytes_ < kBlockBytes) return;
    Compress(pending_.data());
    pending_bytes_ = 0;
  }
  for (; bytes.size() >= kBlockBytes; bytes = bytes.subspan(kBlockBytes)) Compress(bytes.data());
  if (!bytes.empty()) std::memcpy(pending_.data(), bytes.data(), bytes.size());
  pending_bytes_ = bytes.size();
}

Sha256::Digest Sha256::Finish() {
  constexpr std::size_t kLengthOffset = kBlockBytes - 8;
  const uint64_t total_bits = total_bytes_ * 8;
  pending_[pending_bytes_++] = 0x80;
  if (pending_bytes_ > kLengthOffset) {
    std::fill(pending_.begin() + pending_bytes_, pending_.end(), uint8_t{0});
    Compress(pending_.data());
    pending_bytes_ = 0;
  }
  std::fill(pending_.begin() + pending_bytes_, pending_.end(), uint8_t{0});
  StoreBigEndian(static_cast<uint32_t>(total_bits >> 32), pending_.data() + kLengthOffset);
  StoreBigEndian(static_cast<uint32_t>(total_bits), pending_.data() + kLengthOffset + 4);
  Compress(pending_.data());

  Digest digest;
  for (std::size_t i = 0; i < state_.size(); ++i) StoreBigEndian(state_[i], digest.data() + 4 * i);
  return digest;
}

void Sha256::Compress(const uint8_t* block) {
  if (HasSha256Instructions()) {
    CompressWithInstructions(state_.data(), block);
  } else {
    CompressPortably(state_.data(), block);
  }
}

void Sha256::CompressPortably(uint32_t* state, const uint8_t* block) {
  std::array<uint32_t, 64> w;
  for (std::size_t i = 0; i < 16; ++i) w[i] = LoadBigEndian(block + 4 * i);
  for (std::size_t i = 16; i < w.size(); ++i) {
    const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
  uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
  for (std::size_t i = 0; i < w.size(); ++i) {
    const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + kSha256RoundConstants[i] + w[i];
    const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<uint32_t, 8> added = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < added.size(); ++i) state[i] += added[i];
}

}  // namespace tokenspeed
