// KeyTable: objects found by their CacheKey.
//
// Made for a step in which many rows each publish a page into a cache that is far larger than the processor's caches:
// - A look-up reads one line of an array of eight-byte slots (open addressing, at most half full) and then the object.
// - A slot keeps its hash: growing and erasing read no object.
// - Objects lie in chunks that never move and are reused last in, first out: what has just been evicted is in the caches.
//
// Entry has members `key` (a CacheKey), `weight` (the key's hash, uint32_t) and `number` (uint32_t), which the table
// sets; it is default-constructed with its chunk, and its owner resets what it holds.
//
// Ownership: owns the objects. Thread safety: none. Costs: O(1) expected.

#ifndef TOKENSPEED_PREFIX_KEY_TABLE_H_
#define TOKENSPEED_PREFIX_KEY_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "prefix/cache_key.h"

namespace tokenspeed {

template <typename Entry>
class KeyTable {
 public:
  std::size_t size() const { return size_; }

  // Null when there is none.
  Entry* Find(const CacheKey& key) const {
    if (size_ == 0) return nullptr;
    const uint32_t hash = HashOf(key);
    for (std::size_t place = hash & mask_; slots_[place].number != 0; place = (place + 1) & mask_) {
      if (slots_[place].hash != hash) continue;
      Entry& entry = At(slots_[place].number);
      if (entry.key == key) return &entry;
    }
    return nullptr;
  }

  // The object of this key, and whether it is new.
  std::pair<Entry*, bool> FindOrMake(const CacheKey& key) {
    if (2 * (size_ + 1) > slots_.size()) Grow();
    const uint32_t hash = HashOf(key);
    std::size_t place = hash & mask_;
    for (; slots_[place].number != 0; place = (place + 1) & mask_) {
      if (slots_[place].hash != hash) continue;
      Entry& entry = At(slots_[place].number);
      if (entry.key == key) return {&entry, false};
    }
    Entry& entry = TakeFree();
    entry.key = key;
    entry.weight = hash;
    slots_[place] = {.hash = hash, .number = entry.number};
    ++size_;
    return {&entry, true};
  }

  void Erase(Entry& entry) {
    std::size_t hole = entry.weight & mask_;
    while (slots_[hole].number != entry.number) hole = (hole + 1) & mask_;
    // What stands behind and could stand in the hole moves there, so that no search ever has to pass a hole.
    for (std::size_t place = (hole + 1) & mask_; slots_[place].number != 0; place = (place + 1) & mask_) {
      const std::size_t from_home = (place - slots_[place].hash) & mask_;
      if (from_home < ((place - hole) & mask_)) continue;
      slots_[hole] = slots_[place];
      hole = place;
    }
    slots_[hole] = {};
    free_.push_back(entry.number);
    --size_;
  }

  // Calls `visit` with every object, those too that are not in use.
  template <typename Visit>
  void ForEachObject(Visit&& visit) {
    for (const auto& chunk : chunks_) {
      for (std::size_t i = 0; i < kChunk; ++i) visit(chunk[i]);
    }
  }

 private:
  static constexpr std::size_t kChunk = 128;
  static constexpr std::size_t kFirstSlots = 64;

  struct Slot {
    uint32_t hash = 0;
    uint32_t number = 0;  // of the object, from 1; 0 = free
  };

  static uint32_t HashOf(const CacheKey& key) {
    const auto hash = static_cast<uint64_t>(CacheKeyHash()(key));
    return static_cast<uint32_t>(hash ^ hash >> 32);
  }
  Entry& At(uint32_t number) const { return chunks_[(number - 1) / kChunk][(number - 1) % kChunk]; }

  Entry& TakeFree() {
    if (free_.empty()) {
      const auto first = static_cast<uint32_t>(kChunk * chunks_.size() + 1);
      chunks_.push_back(std::make_unique<Entry[]>(kChunk));
      free_.reserve(kChunk * chunks_.size());  // so that erasing never allocates
      for (auto number = first + static_cast<uint32_t>(kChunk); number-- > first;) {
        At(number).number = number;
        free_.push_back(number);
      }
    }
    Entry& entry = At(free_.back());
    free_.pop_back();
    return entry;
  }

  void Grow() {
    std::vector<Slot> old = std::move(slots_);
    slots_.assign(old.empty() ? kFirstSlots : 2 * old.size(), Slot{});
    mask_ = slots_.size() - 1;
    for (const Slot& slot : old) {
      if (slot.number == 0) continue;
      std::size_t place = slot.hash & mask_;
      while (slots_[place].number != 0) place = (place + 1) & mask_;
      slots_[place] = slot;
    }
  }

  std::vector<Slot> slots_;  // a power of two
  std::size_t mask_ = 0;
  std::size_t size_ = 0;
  std::vector<std::unique_ptr<Entry[]>> chunks_;
  std::vector<uint32_t> free_;  // numbers of the objects that are not in use, the one to use next last
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_PREFIX_KEY_TABLE_H_
