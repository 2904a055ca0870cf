// Happens-before: of every byte that streams can touch, who wrote it last and who has read it since. An
// access that is not ordered behind those of other actors, one of them a write, is a race.
#include "null.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace null {

void Moment::join(const Moment &other) {
    seconds = std::max(seconds, other.seconds);
    if (seen.size() < other.seen.size()) seen.resize(other.seen.size());
    for (size_t i = 0; i < other.seen.size(); i++) seen[i] = std::max(seen[i], other.seen[i]);
}

static int actors = 0;

Actor::Actor(const std::string &name) : number(actors++), name(name) {}

unsigned Actor::deed() {
    if ((int)now.seen.size() <= number) now.seen.resize(number + 1);
    return ++now.seen[number];
}

struct Access {
    int actor;
    unsigned deed;
    const std::string *label;
    bool operator==(const Access &o) const { return actor == o.actor && deed == o.deed && label == o.label; }
};

// Bytes with one history. Disjoint in the map, by their first byte; bytes that nobody touched are in no
// stretch.
struct Stretch {
    uintptr_t end;
    std::vector<Access> writes;  // the last one, or none
    std::vector<Access> reads;   // since then, those that no later one is ordered behind
};

static std::map<uintptr_t, Stretch> stretches;
static std::set<std::string> labels, races;

static void cut(uintptr_t at) {
    auto it = stretches.upper_bound(at);
    if (it == stretches.begin()) return;
    --it;
    if (it->first == at || it->second.end <= at) return;
    Stretch rest = it->second;
    it->second.end = at;
    stretches.emplace(at, rest);
}

static void check(const Moment &now, const std::vector<Access> &earlier, const char *before,
                  const std::string &label, const char *mine) {
    for (auto &a : earlier)
        if (!now.after(a.actor, a.deed)) races.insert(*a.label + " " + before + ", " + label + " " + mine);
}

void touch(Actor &actor, const Range &range, const std::string &what) {
    if (!range.bytes) return;
    uintptr_t start = (uintptr_t)range.start, end = start + range.bytes;
    const Moment &now = actor.now;
    const std::string &label = *labels.insert(actor.name + ": " + what).first;
    Access mine{actor.number, now.seen[actor.number], &label};
    cut(start), cut(end);
    auto it = stretches.lower_bound(start);
    if (range.writes) {
        for (; it != stretches.end() && it->first < end; it = stretches.erase(it)) {
            check(now, it->second.writes, "writes", label, "writes");
            check(now, it->second.reads, "reads", label, "writes");
        }
        stretches.emplace(start, Stretch{end, {mine}, {}});
        return;
    }
    for (uintptr_t at = start; at < end; at = it->second.end, ++it) {
        if (it == stretches.end() || it->first > at)  // nobody was here before
            it =
                stretches.emplace(at, Stretch{it == stretches.end() ? end : std::min(end, it->first), {}, {}})
                    .first;
        Stretch &s = it->second;
        check(now, s.writes, "writes", label, "reads");
        std::erase_if(s.reads, [&](const Access &a) {
            return now.after(a.actor, a.deed);
        });  // whoever is behind me is behind them
        s.reads.push_back(mine);
    }
    // neighbours with one history become one stretch again: as few as there are histories
    for (it = stretches.lower_bound(start); it != stretches.end() && it->first <= end;) {
        auto before = it == stretches.begin() ? stretches.end() : std::prev(it);
        if (before != stretches.end() && before->second.end == it->first &&
            before->second.writes == it->second.writes && before->second.reads == it->second.reads) {
            before->second.end = it->second.end;
            it = stretches.erase(it);
        } else {
            ++it;
        }
    }
}

void forget(const void *p, size_t bytes) {
    uintptr_t start = (uintptr_t)p, end = start + bytes;
    cut(start), cut(end);
    stretches.erase(stretches.lower_bound(start), stretches.lower_bound(end));
}

}  // namespace null

using namespace null;

// The races so far, a line each, into `text` of so many bytes; returns the length of all, as snprintf does.
extern "C" size_t null_races(char *text, size_t bytes) {
    Lock lock(mutex);
    std::string all;
    for (auto &line : races) all += line + "\n";
    if (bytes) {
        size_t n = std::min(bytes - 1, all.size());
        memcpy(text, all.data(), n);
        text[n] = 0;
    }
    return all.size();
}

// Takes them off the list: the next thing is looked at by itself.
extern "C" void null_clear_races() {
    Lock lock(mutex);
    races.clear();
}
